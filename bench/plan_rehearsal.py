"""Planned memory against torch's GPU allocator, without a GPU: `python -m bench.plan --device rehearsal`.

A row is a job over a model of real size, in a process of its own over the runtime of tests/rehearsal. The model is
built as a trainer builds it, and takes two optimizer steps; no kernel computes, and weights are made on the device
without values. What is measured is `torch.cuda.max_memory_allocated`: the allocator, autograd and the choice of
kernels are real, the kernels are not, so workspaces of vendors' libraries and the driver's context are not in it. Then
the job is run once more on a device of the size that the planner asks for (`--smallest`: also on smaller ones, by
halving).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import finish, hardware

GIB = 1 << 30
STEPS = 2
WITHIN = 0.05
MARGIN = 0.9
"""Share of a device that the planner gives to a job."""
HALVINGS = 4
OUT_OF_MEMORY = 3
"""Exit code of a child whose device is too small."""

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    shape: str
    kind: str
    """lora, qlora, int8 or full."""
    checkpointed: bool
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        kept = "checkpointed" if self.checkpointed else "all kept"
        return f"{self.shape} {self.kind}, {kept}, {self.rows}x{self.tokens}"

    @property
    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = {
            "model": "/model",
            "data": "/rows.jsonl",
            "training": {"per_device_train_batch_size": self.rows, "precision": "bf16"},
            "resources": {"accelerator": "gpu"},
            "memory": {"gradient_checkpointing": True} if self.checkpointed else {},
        }
        match self.kind:
            case "full":
                return job | {"method": "full"}
            case "lora":
                return job | {"method": {"type": "lora", "r": 16}}
            case quantised:
                return job | {
                    "method": {"type": "qlora", "r": 16},
                    "quantization": "int8" if quantised == "int8" else "nf4",
                }


ROWS = [
    Row("1b", "lora", True, 1, 2048),
    Row("1b", "lora", False, 1, 2048),
    Row("1b", "full", True, 4, 2048),
    Row("8b", "lora", True, 1, 2048),
    Row("8b", "lora", True, 4, 2048),
    Row("8b", "lora", True, 4, 8192),
    Row("8b", "lora", False, 1, 2048),
    Row("8b", "qlora", True, 1, 2048),
    Row("8b", "qlora", True, 4, 2048),
    Row("8b", "int8", True, 1, 2048),
    Row("8b", "full", True, 1, 2048),
    Row("8b", "full", True, 4, 2048),
    Row("70b", "lora", True, 1, 2048),
    Row("70b", "qlora", True, 1, 2048),
]


# --- in the child ------------------------------------------------------------------------------------


def folder_of(shape: str, work: Path) -> Path:
    """A model's folder with its configuration and the headers of its weights, which are a hole in a file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = work / shape
    if folder.exists():
        return folder
    about = dict(SHAPES[shape])
    config: Any = AutoConfig.for_model(about.pop("model_type"), **about)
    config.dtype, config.bos_token_id, config.eos_token_id, config.pad_token_id = torch.bfloat16, 0, 0, 0
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    header, at = {}, 0
    for name, tensor in model.state_dict().items():
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + 2 * tensor.numel()]}
            at += 2 * tensor.numel()
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    return folder


def without_values() -> None:
    """Have models loaded as tensors of the device that nobody fills: values do not change what the allocator gives."""
    import torch
    from torch import nn

    import core.train.loss.head as head
    import core.train.model.build as build
    import core.train.quant.fill as fill
    import core.train.quant.model as quantised
    from core.train.quant.int8 import Int8Weight
    from core.train.quant.layout import NF4Weight, dynamic_map
    from core.train.quant.skeleton import skeleton

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def nf4(weight: Any, block: int = 64, double: bool = True) -> Any:
        n, kept = weight.numel(), (tuple(weight.shape), weight.dtype, block)
        blocks, packed = -(-n // block), empty(-(-n // 2), 1, dtype=torch.uint8)
        if not double:
            return NF4Weight(packed, empty(blocks), None, None, None, *kept)
        nested = empty(-(-blocks // 256)), dynamic_map(torch.device("cuda")), empty().reshape(())
        return NF4Weight(packed, empty(blocks, dtype=torch.uint8), *nested, *kept)

    def int8(weight: Any, block: int = 64) -> Any:
        n = weight.numel()
        return Int8Weight(
            empty(n, 1, dtype=torch.int8), empty(-(-n // block)), tuple(weight.shape), weight.dtype, block
        )

    def set_(model: Any, name: str, tensor: Any, dtype: torch.dtype) -> None:
        parent, _, local = name.rpartition(".")
        model.get_submodule(parent)._parameters[local] = nn.Parameter(empty(*tensor.shape, dtype=dtype))

    def tensors(folder: Path) -> Any:
        model, _ = skeleton(folder, torch.bfloat16)
        for name, tensor in model.state_dict().items():
            yield name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def load(folder: Path, dtype: torch.dtype) -> Any:
        model, _ = skeleton(folder, dtype)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[name] = nn.Parameter(empty(*parameter.shape, dtype=dtype))
        model.tie_weights()
        return model.eval()

    fill.quantize_nf4, fill.quantize_int8, fill._set = nf4, int8, set_
    quantised.read_tensors, build.load_model = tensors, load
    head._gap = lambda *_: 0.0  # what it compares was not computed


def measure(row: Row, work: Path) -> dict[str, Any]:
    """The child: plan, build, two optimizer steps; bytes."""
    import numpy as np
    import torch

    from bench.qlora_models import tokenizer_for
    from core.plan.device import Device
    from core.plan.memory import plan
    from core.plan.models.shape import Shape
    from core.spec.job import JobSpec
    from core.spec.resolve import resolve
    from core.spec.run.orders import DataOrder, RunOrder
    from core.spec.settled import method_of
    from core.train.base.events import NullEventWriter
    from core.train.data.dataset import TokenDataset
    from core.train.engine import build_engine
    from core.train.model.build import build_model
    from core.train.model.load import quiet
    from core.train.model.placement import place
    from core.train.run import Run
    from core.train.stages.sft import SupervisedFineTuning

    quiet()
    without_values()
    folder = folder_of(row.shape, work)
    spec = resolve(JobSpec.model_validate(row.job))
    placement = place(spec.resources, spec.training, method_of(spec))
    device = Device("gpu", placement.arch, host=200 * GIB)
    planned = plan(spec, Shape.of_folder(folder), longest=row.tokens, device=device)
    order = RunOrder(job_id="plan", attempt=1, spec=spec, model_dir=str(folder), train=DataOrder(sources=[]))
    tokenizer = tokenizer_for(folder)
    torch.cuda.reset_peak_memory_stats()
    built = build_model(Run(order, work, NullEventWriter()), placement, tokenizer, row.tokens)
    engine = build_engine(
        built.model, spec.optimizer, device=placement.device, autocast=placement.autocast, updates=built.updates
    )
    stage = SupervisedFineTuning()
    ids = (np.arange(row.rows * row.tokens) * 7919 + 11) % 1000
    ends = np.arange(1, row.rows + 1) * row.tokens
    flags = np.ones(len(ids), dtype=np.bool_)
    data = TokenDataset(ids.astype(np.int32), flags, ends - row.tokens, ends, np.arange(row.rows))
    for _ in range(STEPS):
        batch = data.collate(range(row.rows), 0)
        engine.backward(engine.forward(batch, stage.loss, {"label_tokens": batch.label_tokens}).total)
        del batch
        engine.step()
    return {
        "planned": planned.peak,
        "moment": planned.moment,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "whole_logits": engine.policy.whole_logits,
    }


def child(name: str, work: Path) -> None:
    import torch

    try:
        print(json.dumps(measure(next(row for row in ROWS if row.name == name), work)))
    except torch.OutOfMemoryError:
        sys.exit(OUT_OF_MEMORY)


# --- in the parent -----------------------------------------------------------------------------------


def main(only: str | None, smallest: bool) -> None:
    from tests.rehearsal.install import Unavailable, prepare

    try:
        prepare()
    except Unavailable as why:
        sys.exit(f"no rehearsal: {why}")
    wanted = [row for row in ROWS if not only or any(part in row.name for part in only.split(","))]
    with tempfile.TemporaryDirectory() as aside:
        results = [_compare(row, Path(aside), smallest) for row in wanted]
    far = [each["name"] for each in results if abs(each["error"]) > WITHIN]
    unfit = [each["name"] for each in results if not each["fits"]]
    print(
        f"{len(results) - len(far)} of {len(results)} within {WITHIN:.0%}" + (f"; not: {', '.join(far)}" if far else "")
    )
    print(f"{len(results) - len(unfit)} of {len(results)} run on a device of the planned size")
    about = {"device": "rehearsal", "hardware": hardware(), "within": WITHIN, "rows": results}
    finish({"plan": about})


def _compare(row: Row, work: Path, smallest: bool) -> dict[str, Any]:
    found = _run(row, work, 250 * GIB)
    assert found is not None, "250 GiB are enough for every row"
    assert found["whole_logits"] is None, "the loss in chunks is what is planned"
    asked = int(found["planned"] / MARGIN)
    fits = _run(row, work, asked) is not None
    error = found["planned"] / found["allocated"] - 1
    needs = ""
    if smallest:
        low, high = found["allocated"], max(found["reserved"], asked)
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if _run(row, work, middle) is not None else (middle, high)
        found["smallest"] = high
        needs = f"   at least {high / GIB:.2f}"
    planned, allocated, reserved = (found[name] / GIB for name in ("planned", "allocated", "reserved"))
    print(
        f"{row.name:<32} planned {planned:7.2f} GiB   allocated {allocated:7.2f}   {error:+6.1%}   "
        f"reserved {reserved:7.2f}   {'runs' if fits else 'OUT OF MEMORY'} on {asked / GIB:.2f}{needs}"
        f"   ({found['moment']})",
        flush=True,
    )
    return found | {"name": row.name, "error": error, "fits": fits}


def _run(row: Row, work: Path, size: int) -> dict[str, Any] | None:
    """What the child says; None where a device of this size has no memory for it."""
    from tests.rehearsal.environment import variables

    about = variables(bytes=size, numbers=0, poison=0, order="prompt", largest=1 << 20)
    command = [sys.executable, "-m", "bench.plan_rehearsal", row.name, str(work)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | about, check=False)
    if ended.returncode == OUT_OF_MEMORY:
        return None
    ended.check_returncode()
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The child of bench.plan --device rehearsal.")
    parser.add_argument("name")
    parser.add_argument("work", type=Path)
    given = parser.parse_args()
    child(given.name, given.work)
