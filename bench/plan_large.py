"""Planned memory against torch's GPU allocator for models of real size: `python -m bench.plan --device cuda|rehearsal`.

A row is a job over a model of 1B to 70B, in processes of its own. The model is built as a trainer builds it, and takes
two optimizer steps; weights are made without values. What is measured is `torch.cuda.max_memory_allocated`, beside
`max_memory_reserved`. Then the job is run with as much memory as the planner asks for.

`rehearsal` needs no GPU (tests/rehearsal): the allocator, autograd and the choice of kernels are real, the kernels are
not, so workspaces of vendors' libraries are not in it. There the smallest device on which the job runs is found by
halving as well. Blocks that are streamed and states that are offloaded lie in host memory, where they are really
written: their rows are for models of which they fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import finish, gpus, hardware

GIB = 1 << 30
STEPS = 2
WITHIN = 0.05
MARGIN = 0.9
"""Share of a device that the planner gives to a job."""
HALVINGS = 4
OUT_OF_MEMORY = 3
"""Exit code of a child whose device is too small."""
LARGEST = 250 * GIB
"""Enough for every row."""
BYTES = "EFT_PLAN_BYTES"
"""Variable of a child on a real card: how much of the card it may use."""

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "1b, 2 blocks": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
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


MEMORY: dict[str, dict[str, Any]] = {
    "": {},
    "streamed": {"stream": "host"},
    "offloaded": {"offload_optimizer": "host"},
    "inputs offloaded": {"activation_offloading": "host"},
}


@dataclass(frozen=True)
class Row:
    shape: str
    kind: str
    """lora, qlora, int8 or full."""
    checkpointed: bool
    rows: int
    tokens: int
    memory: str = ""
    """`streamed` or `offloaded`: what lies in host memory."""

    @property
    def name(self) -> str:
        kept = "checkpointed" if self.checkpointed else "all kept"
        return ", ".join(filter(None, (f"{self.shape} {self.kind}", self.memory, kept, f"{self.rows}x{self.tokens}")))

    @property
    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = {
            "model": "/model",
            "data": "/rows.jsonl",
            "training": {"per_device_train_batch_size": self.rows, "precision": "bf16"},
            "resources": {"accelerator": "gpu"},
            "memory": {"gradient_checkpointing": self.checkpointed} | MEMORY[self.memory],
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
    *(
        Row("1b", kind, checkpointed, rows, tokens)
        for kind in ("lora", "qlora", "int8", "full")
        for checkpointed, rows, tokens in ((True, 1, 2048), (True, 4, 8192), (False, 1, 2048))
    ),
    *(
        Row("8b", kind, checkpointed, rows, tokens)
        for kind in ("lora", "qlora", "int8", "full")
        for checkpointed, rows, tokens in (
            (True, 1, 2048), (True, 4, 2048), (True, 1, 8192), (True, 4, 8192), (False, 1, 2048)
        )
    ),
    *(
        Row("70b", kind, True, rows, tokens)
        for kind in ("lora", "qlora", "int8")
        for rows, tokens in ((1, 2048), (4, 2048))
    ),
    Row("8b", "lora", True, 4, 2048, "inputs offloaded"),
    Row("8b", "qlora", True, 1, 2048, "streamed"),
    Row("8b", "qlora", True, 4, 2048, "streamed"),
    Row("1b, 2 blocks", "full", True, 1, 2048, "offloaded"),
]  # fmt: skip


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


def without_values(device: str) -> None:
    """Have models loaded as tensors that nobody fills: values do not change what the allocator gives."""
    import torch
    from torch import nn

    import core.train.loss.head as head
    import core.train.model.build as build
    import core.train.quant.fill as fill
    import core.train.quant.model as quantised
    from core.train.engine import Engine
    from core.train.quant.int8 import Int8Weight
    from core.train.quant.layout import NF4Weight, dynamic_map
    from core.train.quant.skeleton import skeleton

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    def nf4(weight: Any, block: int = 64, double: bool = True) -> Any:
        n, kept = weight.numel(), (tuple(weight.shape), weight.dtype, block)
        blocks, packed = -(-n // block), empty(-(-n // 2), 1, dtype=torch.uint8)
        if not double:
            return NF4Weight(packed, empty(blocks), None, None, None, *kept)
        nested = empty(-(-blocks // 256)), dynamic_map(torch.device(device)), empty().reshape(())
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

    def load(folder: Path, dtype: torch.dtype, *, head: str) -> Any:
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
    Engine.check = lambda _: None  # type: ignore[method-assign]  # nor were gradients, which may read as no numbers


def use_no_more_than(size: int) -> None:
    """Have the allocator of this process refuse what goes beyond `size` bytes of the card."""
    import torch

    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / whole))


def measure(row: Row, work: Path) -> dict[str, Any]:
    """Plan, build, two optimizer steps; bytes. torch.OutOfMemoryError where the device is too small."""
    import numpy as np
    import torch

    from bench.qlora_models import tokenizer_for
    from core.plan.device import Device
    from core.plan.memory.plan import plan
    from core.plan.models.shape import Shape
    from core.spec.job import JobSpec
    from core.spec.resolve import resolve
    from core.spec.run.orders import DataOrder, RunOrder
    from core.spec.settled import method_of
    from core.train.base.events import NullEventWriter
    from core.train.data.dataset import TokenDataset
    from core.train.engine import build_engine
    from core.train.kernels.interface import backend_for
    from core.train.model.build import build_model
    from core.train.model.placement import place
    from core.train.run import Run
    from core.train.stages.sft import SupervisedFineTuning

    folder = folder_of(row.shape, work)
    spec = resolve(JobSpec.model_validate(row.job))
    placement = place(spec.resources, spec.training, method_of(spec))
    parts = backend_for(placement.device, "block") != "portable"
    device = Device("gpu", placement.arch, host=200 * GIB, parts=parts)
    planned = plan(spec, Shape.of_folder(folder), longest=row.tokens, device=device)
    order = RunOrder(job_id="plan", attempt=1, spec=spec, model_dir=str(folder), train=DataOrder(sources=[]))
    tokenizer = tokenizer_for(folder)
    torch.cuda.reset_peak_memory_stats()
    with Run(order, work, NullEventWriter()) as run:
        built = build_model(run, placement, tokenizer, row.tokens)
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
        engine.updates.synchronize()
        return {
            "planned": planned.peak,
            "moment": planned.moment,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "whole_logits": engine.policy.whole_logits,
        }


def child(name: str, work: Path) -> None:
    """One row as a line of JSON."""
    import torch

    from core.train.model.load import quiet

    quiet()
    row = next(row for row in ROWS if row.name == name)
    if BYTES in os.environ:
        use_no_more_than(int(os.environ[BYTES]))
    without_values("cpu" if row.memory in ("streamed", "offloaded") else "cuda")
    end = 0
    try:
        print(json.dumps(measure(row, work)), flush=True)
    except torch.OutOfMemoryError:
        end = OUT_OF_MEMORY
    os._exit(end)  # nothing is to be tidied up, and threads of libraries may wait for one another


# --- in the parent -----------------------------------------------------------------------------------


def main(only: str | None, device: str, at_once: int) -> None:
    """Compare the rows, `at_once` at a time, and print the figures."""
    if device == "rehearsal":
        from tests.rehearsal.install import Unavailable, prepare

        try:
            prepare()
        except Unavailable as why:
            sys.exit(f"no rehearsal: {why}")
    found = gpus() if device == "cuda" else [("rehearsal", LARGEST)]
    if not found:
        sys.exit("--device cuda: torch sees no GPU here")
    card = dict(zip(("name", "bytes"), found[0], strict=True))
    wanted = [row for row in ROWS if not only or any(part in row.name for part in only.split(";"))]
    with tempfile.TemporaryDirectory() as aside, ThreadPoolExecutor(at_once) as pool:
        for shape in {row.shape for row in wanted}:
            folder_of(shape, Path(aside))
        tried = list(pool.map(lambda row: _compare(row, Path(aside), card), wanted))
    results = [each for each in tried if each is not None]
    far = [each["name"] for each in results if abs(each["error"]) > WITHIN]
    unfit = [each["name"] for each in results if not each["fits"]]
    told = f"; not: {', '.join(far)}" if far else ""
    print(f"{len(results) - len(far)} of {len(results)} within {WITHIN:.0%}{told}")
    told = f"; not: {', '.join(unfit)}" if unfit else ""
    print(f"{len(results) - len(unfit)} of {len(results)} run on a device of the planned size{told}")
    about = {"device": card["name"], "hardware": hardware(), "within": WITHIN, "rows": results}
    finish({"plan": about})


def _run(row: Row, work: Path, size: int, card: dict[str, Any]) -> dict[str, Any] | None:
    """What the child says; None where a device of this size has no memory for it."""
    about = {BYTES: str(size)}
    if card["name"] == "rehearsal":
        from tests.rehearsal.environment import variables

        about = variables(bytes=size, numbers=0, poison=0, order="prompt", largest=1 << 20)
    command = [sys.executable, "-m", "bench.plan_large", row.name, str(work)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | about, check=False)
    if ended.returncode == OUT_OF_MEMORY:
        return None
    if ended.returncode:
        raise RuntimeError(f"{row.name}: {ended.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _compare(row: Row, work: Path, card: dict[str, Any]) -> dict[str, Any] | None:
    """Figures of a row; None where the card has no memory for it."""
    found = _run(row, work, card["bytes"], card)
    if found is None:
        print(f"{row.name:<46} not measured: out of memory on {card['name']}", flush=True)
        return None
    found["asked"] = int(found["planned"] / MARGIN)
    found["fits"] = _run(row, work, found["asked"], card) is not None
    assert found["whole_logits"] is None, "the loss in chunks is what is planned"
    found["error"] = found["planned"] / found["allocated"] - 1
    shown = {name: found[name] / GIB for name in ("planned", "allocated", "reserved", "asked")}
    smallest = ""
    if card["name"] == "rehearsal":
        found["smallest"] = _smallest(row, work, found, card)
        smallest = f"   smallest {found['smallest'] / GIB:.2f}"
    print(
        f"{row.name:<46} planned {shown['planned']:7.2f} GiB   allocated {shown['allocated']:7.2f}   "
        f"{found['error']:+6.1%}   reserved {shown['reserved']:7.2f}   "
        f"{'runs' if found['fits'] else 'OUT OF MEMORY'} on {shown['asked']:.2f}{smallest}   ({found['moment']})",
        flush=True,
    )
    return found | {"name": row.name}


def _smallest(row: Row, work: Path, found: dict[str, Any], card: dict[str, Any]) -> int:
    low, high = int(found["allocated"] * 0.95), max(found["reserved"], found["asked"])
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if _run(row, work, middle, card) is not None else (middle, high)
    return int(high)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The child of bench.plan --device cuda and rehearsal.")
    parser.add_argument("name")
    parser.add_argument("work", type=Path)
    given = parser.parse_args()
    child(given.name, given.work)
