"""Full fine-tuning with the optimizer in host memory against resident: `python -m bench.offload [--device cuda]`.

One model three times in one process, over the same batches, in turn: seconds of a step (forward, backward, AdamW in
float32; bf16 under autocast) resident and offloaded, the ratio offloaded / resident, and whether the weights are the
same. On a CPU device and host are one memory, so that nothing is saved and the ratio is what hooks, the second copy of
the weights and the units cost (`--beside`: with the update in a thread beside the next forward, as on a GPU; there the
update and the forward share the cores). On a GPU also the allocator's peaks, and what a resident model cannot do is
null. Peers, where they are installed and run on the device: DeepSpeed's ZeRO-Offload (stage 2, DeepSpeedCPUAdam, bf16
with float32 masters in host memory) and torchao's CPUOffloadOptimizer (bf16 weights without masters, no clipping, and
not with accumulation: it does less).

    python -m bench.offload --device cuda --model llama-1b --tokens 4096
    python -m bench.offload --device cuda --model llama-8b --tokens 4096 --accumulate 8

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.qlora import quiet
from bench.qlora_models import folder_of, vocabulary_of
from bench.report import compare, finish, hardware, show
from core.spec.axes.optimizer import AdamW
from core.train.batch import Batch
from core.train.engine import Engine, build_engine
from core.train.memory.offload.optimizer import OptimizerOffload
from core.train.methods.full import adapt_full
from core.train.model.load import load_model
from core.train.stages.sft import SupervisedFineTuning

RATE = 1e-5
ROW = 512
PEERS = ("deepspeed", "torchao")


class Missing(Exception):
    """A peer that cannot run here; the words say why."""


@dataclass
class Contender:
    step: Callable[[list[Batch]], None]
    """One optimizer step on a window of batches."""
    device: torch.device
    engine: Engine | None = None

    def seconds(self, window: list[Batch]) -> float:
        _wait(self.device)
        began = time.perf_counter()
        self.step(window)
        _wait(self.device)
        return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(folder: Path, device: torch.device, args: argparse.Namespace, *, offload: bool) -> Contender:
    model: Any = adapt_full(load_model(folder, torch.float32))
    beside = True if args.beside else None
    updates = OptimizerOffload(model, device, narrow=torch.bfloat16, beside=beside) if offload else None
    model.to(device)
    _checkpoint(model, args)
    engine = build_engine(model, AdamW(learning_rate=RATE), device=device, autocast=torch.bfloat16, updates=updates)
    loss = SupervisedFineTuning().loss

    def step(window: list[Batch]) -> None:
        totals = {"label_tokens": sum(batch.label_tokens for batch in window)}
        for batch in window:
            engine.backward(engine.forward(batch, loss, totals).total)
        engine.step()

    return Contender(step, device, engine)


def _checkpoint(model: Any, args: argparse.Namespace) -> None:
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


# --- peers -----------------------------------------------------------------------------------------------


def peer(name: str, folder: Path, device: torch.device, args: argparse.Namespace) -> Contender:
    """Raises Missing."""
    if find_spec(name) is None:
        raise Missing("not installed")
    match name:
        case "deepspeed":
            return _deepspeed(folder, device, args)
        case "torchao":
            return _torchao(folder, device, args)
        case _:
            raise ValueError(name)


def _deepspeed(folder: Path, device: torch.device, args: argparse.Namespace) -> Contender:
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    model: Any = adapt_full(load_model(folder, torch.bfloat16))
    _checkpoint(model, args)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"},
        },
    }
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except Exception as error:
        raise Missing(f"does not start here ({type(error).__name__}: {str(error).splitlines()[0][:120]})") from error

    def step(window: list[Batch]) -> None:
        for batch in window:
            moved = batch.to(device)
            engine.backward(engine(input_ids=moved.input_ids, labels=moved.labels, use_cache=False).loss)
            engine.step()

    return Contender(step, device)


def _torchao(folder: Path, device: torch.device, args: argparse.Namespace) -> Contender:
    if device.type != "cuda":
        raise Missing("CPUOffloadOptimizer is for GPUs alone")
    if args.accumulate > 1:
        raise Missing("with gradients that leave the device it cannot accumulate")
    from torchao.optim import CPUOffloadOptimizer

    model: Any = adapt_full(load_model(folder, torch.bfloat16)).to(device)
    _checkpoint(model, args)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=RATE)

    def step(window: list[Batch]) -> None:
        for batch in window:
            moved = batch.to(device)
            model(input_ids=moved.input_ids, labels=moved.labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step, device)


# --- figures ---------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(args.device)
    wanted: dict[str, Callable[[], Contender]] = {
        "offloaded": lambda: ours(folder, device, args, offload=True),
        "resident": lambda: ours(folder, device, args, offload=False),
    }
    wanted |= {name: partial(peer, name, folder, device, args) for name in args.peers}
    here: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    results: dict[str, Any] = {"hardware": _hardware(device), "tokens": args.tokens, "accumulate": args.accumulate}
    vocabulary = vocabulary_of(folder)

    def window(seed: int) -> list[Batch]:
        return [batch_of(args.tokens, vocabulary, args.accumulate * seed + micro) for micro in range(args.accumulate)]

    for name, make in wanted.items():
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            here[name] = make()
            first = peak(device, lambda name=name: here[name].step(window(0)))  # type: ignore[misc]
            results[f"peak_bytes_{name}"] = None if first is None else first - before
        except Missing as missing:
            absent[name] = str(missing)
        except torch.OutOfMemoryError:
            here.pop(name, None)
            absent[name] = "out of memory"
            gc.collect()
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in here}
    for run in range(args.runs):
        for name in list(here) if run % 2 == 0 else list(reversed(here)):
            times[name].append(here[name].seconds(window(run + 1)))
    results["seconds"] = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    for name in wanted:
        if name in absent:
            print(f"{name}: {absent[name]}")
            results[f"to_{name}"] = None
        elif name != "offloaded":
            results[f"to_{name}"] = compare(times["offloaded"], times[name])
            show(f"{args.tokens} tokens × {args.accumulate}, offloaded against {name}", results[f"to_{name}"], "s")
    results |= {"absent": absent, "same_weights": _same(here)}
    for each in here.values():
        if each.engine is not None and isinstance(each.engine.updates, OptimizerOffload):
            results |= each.engine.updates.about()
            each.engine.updates.close()
    return results


def _same(here: dict[str, Contender]) -> bool | float | None:
    """After the same steps: to the bit, or by how much of the weights' own norm they differ."""
    mine, theirs = (here[name].engine if name in here else None for name in ("offloaded", "resident"))
    if mine is None or theirs is None:
        return None
    mine.updates.synchronize()
    off = total = 0.0
    for name, one in mine.trained_parameters.items():
        other = theirs.trained_parameters[name].detach().cpu()
        off += float((one.detach() - other).double().square().sum())
        total += float(other.double().square().sum())
    return True if off == 0.0 else (off / total) ** 0.5


def batch_of(tokens: int, vocabulary: int, seed: int) -> Batch:
    rows, length = max(1, tokens // ROW), min(tokens, ROW)
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids, labels, (length,) * rows, rows * (length - 1))


def peak(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes that the allocator had out at once; None on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _hardware(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}; {hardware()}" if device.type == "cuda" else hardware()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2", help="smollm2, llama-1b, llama-8b, or a folder")
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="also on a CPU: update in a thread")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    args = parser.parse_args()
    quiet()
    results = measure(args, folder_of(args.model))
    finish({"offload": results})


if __name__ == "__main__":
    main()
