"""Planned against measured memory: `python -m bench.plan [--only NAME,…]`.

`--device cuda`: models of real size on this machine's GPU; `--device rehearsal`: the same against torch's own GPU
allocator, on a machine without a GPU (bench/plan_large.py, where `--only` has semicolons).

On a CPU, for each combination of model shape, method, quantisation, batching, checkpointing and streaming, a child
process loads a model of random weights as a trainer does (core/train/model/build.py), takes two optimizer steps and an
evaluation, and says how much memory that took; beside it the plan's `peak` for the same job, made before anything was
loaded.

Measured is the kernel's own figure for the process: the high-water mark of its resident set (VmHWM, set back by writing
5 to /proc/self/clear_refs once the model is loaded: proc_pid_status(5), proc_pid_clear_refs(5)) above what the process
had before it loaded the model, when all code had been run once on a small model, so that libraries are loaded and their
kernels compiled. An account of tensors would leave out what the matrix libraries take for themselves, and that is
memory as well.

The last line is one JSON object.
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
from typing import TYPE_CHECKING, Any

from bench import process
from bench.report import finish, hardware

if TYPE_CHECKING:
    from core.train.kernels.float32 import Route

MIB = 1 << 20
STEPS = 2
"""The first makes the optimizer's state; the second has it from its beginning."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""For the child on a CPU: the C library gives every block of 64 KiB or more back to the kernel at once (mallopt(3)).
By itself it raises that bound to 32 MiB as blocks are freed, and keeps what is below it for later, up to as much again
as all tensors together, and never the same twice: that is its habit, and no property of the job."""
WANTED = 0.20
"""Error of the plan that the goal allows."""

MODELS: dict[str, dict[str, Any]] = {
    # Small shapes of real proportions: a deep one, one whose vocabulary is most of it, and other families.
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": True,
    },
    "wide": {
        "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 49152, "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16384,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 16384,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 8192, "n_positions": 2048},
}  # fmt: skip


@dataclass(frozen=True)
class Combination:
    name: str
    model: str
    job: dict[str, Any]
    longest: int = 128
    eval_rows: int = 0


def _job(method: Any = "lora", rows: int = 8, **more: Any) -> dict[str, Any]:
    training = {"per_device_train_batch_size": rows, "precision": "bf16"} | more.pop("training", {})
    return {"model": "/model", "data": "/rows.jsonl", "method": method, "training": training} | more


R16 = {"r": 16}
CHECKPOINTED = {"gradient_checkpointing": True}
COMBINATIONS = [
    Combination("llama lora bf16", "llama", _job({"type": "lora", **R16})),
    Combination("llama lora bf16 checkpointed", "llama", _job({"type": "lora", **R16}, 16, memory=CHECKPOINTED)),
    Combination("llama lora bf16 selective", "llama", _job(
        {"type": "lora", **R16}, 16, memory={"gradient_checkpointing": "selective"})),
    Combination("llama lora fp32", "llama", _job({"type": "lora", **R16}, training={"precision": "fp32"})),
    Combination("llama qlora nf4", "llama", _job({"type": "qlora", **R16})),
    Combination("llama qlora int8 packed", "llama", _job(
        {"type": "qlora", **R16}, quantization="int8", batching={"type": "packed", "tokens_per_batch": 1024})),
    Combination("llama qlora nf4 tokens checkpointed", "llama", _job(
        {"type": "qlora", **R16}, batching={"type": "tokens", "tokens_per_batch": 2048}, memory=CHECKPOINTED)),
    Combination("llama qlora nf4 from host", "llama", _job({"type": "qlora", **R16}, memory={"stream": "host"})),
    Combination("llama qlora nf4 from disk", "llama", _job({"type": "qlora", **R16}, memory={"stream": "disk"})),
    Combination("llama lora bf16 from disk", "llama", _job(
        {"type": "lora", **R16}, memory={"stream": {"type": "disk", "slots": 1}})),
    Combination("llama full bf16", "llama", _job("full", 4)),
    Combination("llama full bf16 checkpointed", "llama", _job("full", 8, memory=CHECKPOINTED)),
    Combination("llama full bf16 offloaded", "llama", _job("full", 4, memory={"offload_optimizer": "host"})),
    Combination("llama full fp32 accumulated", "llama", _job(
        "full", 4, training={"precision": "fp32", "gradient_accumulation_steps": 2})),
    Combination("wide lora bf16", "wide", _job({"type": "lora", **R16})),
    Combination("wide full bf16", "wide", _job("full", 4)),
    Combination("wide lora evaluated", "wide", _job(
        {"type": "lora", **R16}, 2, evaluation={"type": "held_out", "per_device_eval_batch_size": 4}), eval_rows=4),
    Combination("llama dora bf16", "llama", _job({"type": "lora", "use_dora": True, **R16})),
    Combination("llama lora dropout attention", "llama", _job(
        {"type": "lora", "lora_dropout": 0.1, "target_modules": "attention", **R16})),
    Combination("llama lora eager", "llama", _job({"type": "lora", **R16}, 4, training={"attention": "eager"}), 256),
    Combination("llama lora math", "llama", _job({"type": "lora", **R16}, 4, training={"attention": "math"}), 256),
    Combination("qwen3 lora bf16", "qwen3", _job({"type": "lora", **R16})),
    Combination("gemma2 lora bf16", "gemma2", _job({"type": "lora", **R16})),
    Combination("gpt2 lora bf16", "gpt2", _job({"type": "lora", **R16})),
]  # fmt: skip


# --- in the child ----------------------------------------------------------------------------------------


def measure(work: Path, combination: Combination, account: bool) -> dict[str, Any]:
    """The child: run the job on a small model, then on this one; bytes that it took."""
    from core.train.kernels.float32 import through_float32

    with through_float32(_route(combination)):  # as a run does
        return _measured(work, combination, account)


def _measured(work: Path, combination: Combination, account: bool) -> dict[str, Any]:
    _run(work, combination, small=True)
    before = process.resident()
    found = _run(work, combination, small=False, account=account)
    high = {name: value - before for name, value in found.pop("high").items()}
    return found | {"peak": max(high.values()), **high}


def _route(combination: Combination) -> Route:
    from core.spec.settled import method_of
    from core.train.model.compute import route_of_products
    from core.train.model.placement import place

    spec = _spec(combination)
    return route_of_products(place(spec.resources, spec.training, method_of(spec)), samples=False)


def _spec(combination: Combination) -> Any:
    from core.spec.job import JobSpec
    from core.spec.resolve import resolve

    return resolve(JobSpec.model_validate(combination.job | {"resources": {"accelerator": "cpu"}}))


def _run(work: Path, combination: Combination, *, small: bool, account: bool = False) -> dict[str, Any]:
    import gc

    import numpy as np

    from bench.qlora_models import tokenizer_for
    from core.spec.axes.batching import Packed
    from core.spec.run.orders import DataOrder, RunOrder
    from core.spec.settled import method_of
    from core.train.attention.probe import prepare_packing
    from core.train.base.events import NullEventWriter
    from core.train.data.dataset import TokenDataset, eval_batches
    from core.train.engine import build_engine
    from core.train.evaluation.held_out import measure as evaluate
    from core.train.model.build import build_model
    from core.train.model.load import quiet
    from core.train.model.placement import place
    from core.train.run import Run
    from core.train.stages.sft import SupervisedFineTuning

    quiet()
    folder = work / (("small-" if small else "") + combination.model)
    spec = _spec(combination)
    placement = place(spec.resources, spec.training, method_of(spec))
    longest = 16 if small else combination.longest
    order = RunOrder(
        job_id="plan", attempt=1, spec=spec, model_dir=str(folder), train=DataOrder(sources=[]),
        cache_dir=str(work / "cache"),
    )  # fmt: skip
    built = build_model(Run(order, work, NullEventWriter()), placement, tokenizer_for(folder), longest)
    engine = build_engine(
        built.model, spec.optimizer, device=placement.device, autocast=placement.autocast, updates=built.updates
    )
    if isinstance(spec.batching, Packed):
        prepare_packing(engine)
    stage = SupervisedFineTuning()
    rows = 2 if small else _rows(spec, longest)
    many = max(rows, combination.eval_rows)
    ids = (np.arange(many * longest) * 7919 + 11) % 1000
    ends = np.arange(1, many + 1) * longest
    data = TokenDataset(ids.astype(np.int32), np.ones(len(ids), dtype=np.bool_), ends - longest, ends, np.arange(many))
    gc.collect()
    high = {}
    loaded = process.resident()
    process.reset_peak()
    live: Any = _account(engine, built) if account else None
    for _ in range(1 if small else STEPS):
        for _ in range(spec.training.gradient_accumulation_steps):
            batch = data.pack(range(rows)) if isinstance(spec.batching, Packed) else data.collate(range(rows), 0)
            engine.backward(engine.forward(batch, stage.loss, {"label_tokens": batch.label_tokens}).total)
            del batch
        engine.step()
    high["steps"] = process.peak()
    process.reset_peak()
    if combination.eval_rows and not small:
        evaluate(engine, stage, eval_batches(data, combination.eval_rows, 0, most_tokens=rows * longest))
        high["evaluation"] = process.peak()
    if live is not None:
        live.__exit__(None, None, None)
    for each in (built.streamed, built.offload, built.inputs):
        if each is not None:
            each.close()
    return {"high": high, "loaded": loaded} | ({"tensors": live.peak, "start": live.start} if live else {})


def _rows(spec: Any, longest: int) -> int:
    from core.plan.memory.passes import training_pass

    return int(training_pass(spec, longest)[0]) // longest


def _account(engine: Any, built: Any) -> Any:
    from tests.support.live_bytes import LiveBytes

    held = [*engine.model.parameters(), *engine.model.buffers()]
    but: list[Any] = []
    if built.streamed is not None:
        held += [slot.buffer for slot in built.streamed.cache.slots]
    live = LiveBytes(held, but)
    live.__enter__()  # type: ignore[no-untyped-call]
    return live


# --- in the parent ---------------------------------------------------------------------------------------


def make(folder: Path, about: dict[str, Any], *, small: bool) -> None:
    """A model of random weights in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    about = dict(about)
    if small:
        for name, value in (("hidden_size", 128), ("n_embd", 128), ("num_hidden_layers", 2), ("n_layer", 2),
                            ("intermediate_size", 256), ("vocab_size", 1024), ("num_attention_heads", 4),
                            ("num_key_value_heads", 2), ("n_head", 4), ("head_dim", 32)):  # fmt: skip
            if name in about:
                about[name] = value
    config: Any = AutoConfig.for_model(about.pop("model_type"), **about)
    config.dtype = torch.bfloat16
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def planned(work: Path, combination: Combination) -> Any:
    from core.plan.device import Device
    from core.plan.memory.plan import plan
    from core.plan.models.shape import Shape
    from core.spec.job import JobSpec
    from core.spec.resolve import resolve

    spec = resolve(JobSpec.model_validate(combination.job))
    return plan(spec, Shape.of_folder(work / combination.model), longest=combination.longest, device=Device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "rehearsal"])
    parser.add_argument("--only", help="names, or parts of them, with commas")
    parser.add_argument("--at-once", type=int, help="rows at a time (default: 2, on a GPU 1)")
    parser.add_argument("--account", action="store_true", help="also count tensors (slow), to see what is missing")
    parser.add_argument("--work", type=Path, help="a folder for the models, to be used again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        one = next(each for each in COMBINATIONS if each.name == args.child)
        print(json.dumps(measure(args.work, one, args.account)))
        return
    if args.device != "cpu":
        from bench import plan_large

        plan_large.main(args.only, args.device, args.at_once or (1 if args.device == "cuda" else 2))
        return
    with tempfile.TemporaryDirectory() as aside:
        work = args.work or Path(aside)
        wanted = [
            each for each in COMBINATIONS if not args.only or any(part in each.name for part in args.only.split(","))
        ]
        results = [_compare(work, each, args) for each in wanted]
    far = [each["name"] for each in results if abs(each["error"]) > WANTED]
    missed = f"; not: {', '.join(far)}" if far else ""
    print(f"{len(results) - len(far)} of {len(results)} within {WANTED:.0%}{missed}")
    finish({"plan": {"device": "cpu", "hardware": hardware(), "within": WANTED, "combinations": results}})


def _compare(work: Path, combination: Combination, args: argparse.Namespace) -> dict[str, Any]:
    for small in (True, False):
        folder = work / (("small-" if small else "") + combination.model)
        if not folder.is_dir():
            make(folder, MODELS[combination.model], small=small)
    expected = planned(work, combination)
    command = [sys.executable, "-m", "bench.plan", "--work", str(work), "--child",
               combination.name, *(["--account"] if args.account else [])]  # fmt: skip
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | ALLOCATOR)
    found = json.loads(child.stdout.splitlines()[-1])
    error = expected.peak / found["peak"] - 1
    print(
        f"{combination.name:<40} planned {expected.peak / MIB:8.1f} MiB   measured {found['peak'] / MIB:8.1f} MiB   "
        f"{error:+7.1%}   ({expected.moment})",
        flush=True,
    )
    if args.account:
        own = expected.peak - expected.bytes.get("slack", 0)
        for figures in (expected.bytes, expected.moments, found):
            print("      ", {name: round(count / MIB, 1) for name, count in figures.items()})
        print(f"       of tensors alone {own / found['tensors'] - 1:+.1%}")
    return {"name": combination.name, "planned": expected.peak, "measured": found["peak"], "error": error,
            "bytes": expected.bytes, "moment": expected.moment}  # fmt: skip


if __name__ == "__main__":
    main()
