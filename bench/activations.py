"""What blocks keep for the backward, measured against each other: `python -m bench.activations [--device cuda]`.

One model (LoRA r 16 on all linear layers), and steps of forward, backward and AdamW in turn over the same batches:

none          everything is kept
selective     inputs of blocks and what is dear to make again (`gradient_checkpointing: selective`)
whole         inputs (`gradient_checkpointing: true`: torch's checkpoints)
offloaded     inputs, in host memory (`activation_offloading: true`)
streamed      inputs, and frozen blocks in host memory (`stream: host`), whole and with `selective`

and peers: transformers' own offload of checkpoints (torch's save_on_cpu, which neither copies ahead nor beside), and,
on a GPU, TRL's OffloadActivations over transformers' checkpoints. For each: the ratio of its steps to those of `none`
and of `whole`, pair by pair, bytes that are kept on the device between forward and backward (on a CPU of all storages
that torch makes, less those of the host's pool; on a GPU by the allocator, with the peak beside it), bytes in host
memory, and whether gradients are those of `none` to the bit.

On a CPU device and host are one memory: an offloaded input is copied there and back, and nothing is saved.

    python -m bench.activations --device cuda --shape llama-8b --quantization nf4
    python -m bench.activations --device cuda --shape llama-8b --quantization none

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.memory_contenders import Contender, contender
from bench.memory_ids import ids_of
from bench.qlora import Tee, quiet
from bench.qlora_models import ROOT, SHAPES, folder_of, vocabulary_of
from bench.report import compare, finish, hardware, show
from core.train.batch import IGNORE_INDEX, Batch
from core.train.failures import is_out_of_memory
from core.train.kernels.scratch import clear_scratch
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.policy import checkpoint_blocks
from core.train.memory.offload.activations import ActivationOffload
from core.train.quant.targets import QuantOptions
from tests.support.live_bytes import LiveBytes

PEERS = ("transformers' offload", "TRL's offload")


@dataclass
class Way:
    """A contender, held in one of the ways for as long as a step takes."""

    model: Contender
    inputs: ActivationOffload | None
    switch: Callable[[], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        labels = ids.clone()
        labels[:, 0] = IGNORE_INDEX
        batch = Batch(ids, labels, (length,) * rows, rows * (length - 1))
        self.switch()
        with self.around():
            loss: Tensor = self.model.forward(batch)
        return loss

    def step(self, ids: Tensor) -> float:
        engine = self.model.engine
        wait(engine.device)
        began = time.perf_counter()
        engine.backward(self.forward(ids))
        engine.step()
        wait(engine.device)
        return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- who takes part --------------------------------------------------------------------------------------


def ways(args: argparse.Namespace, folder: Path, options: QuantOptions | None, cache: Path) -> dict[str, Way]:
    device = torch.device(args.device)
    resident = contender("resident", folder, device, options, cache, slots=2)
    away = ActivationOffload(device)
    model: Any = resident.engine.model

    def held(policy: CheckpointPolicy | None) -> Callable[[], None]:
        def switch() -> None:
            model.gradient_checkpointing_disable()
            if policy is not None:
                checkpoint_blocks(model, policy)

        return switch

    def transformers() -> None:
        model.gradient_checkpointing_disable()
        model.activation_checkpointing_enable(offload=True)

    found = {
        "none": Way(resident, None, held(None)),
        "selective": Way(resident, None, held(CheckpointPolicy(selective=True))),
        "whole": Way(resident, None, held(CheckpointPolicy())),
        "offloaded": Way(resident, away, held(CheckpointPolicy(inputs=away))),
    }
    if args.streamed:
        streamed = contender("host", folder, device, options, cache, slots=2)

        def having(policy: CheckpointPolicy) -> Callable[[], None]:
            assert streamed.streamed is not None
            return lambda: setattr(streamed.streamed, "policy", policy)

        found["streamed"] = Way(streamed, None, having(CheckpointPolicy()))
        found["streamed, selective"] = Way(streamed, None, having(CheckpointPolicy(selective=True)))
    if args.peers:
        found[PEERS[0]] = Way(resident, None, transformers)
    if args.peers and device.type == "cuda":
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        around = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
        found[PEERS[1]] = Way(resident, None, held(CheckpointPolicy()), lambda: around)
    return found


# --- what is measured ------------------------------------------------------------------------------------


def kept(way: Way, ids: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(bytes kept between forward and backward, the gradients)."""
    engine = way.model.engine
    device = engine.device
    engine.zero_grad()
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():  # others add up in no fixed order
        engine.backward(way.forward(ids))
    gradients = {name: p.grad.clone() for name, p in engine.trained_parameters.items() if p.grad is not None}
    engine.zero_grad()
    figures: dict[str, Any] = {}
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = way.forward(ids)
        wait(device)
        figures["kept_bytes"] = torch.cuda.memory_allocated(device) - before
        engine.backward(loss)
        wait(device)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    else:
        streamed = way.model.streamed
        slots = [] if streamed is None else [slot.buffer for slot in streamed.cache.slots]
        model = engine.model
        with LiveBytes([*model.parameters(), *model.buffers(), *slots], []) as live:
            loss = way.forward(ids)
            clear_scratch()  # dequantised weights that are kept as long as there is room
            host = 0 if way.inputs is None else way.inputs.pool.in_use
            figures["kept_bytes"] = live.now() - live.start - host
        engine.backward(loss)
    figures["host_bytes"] = None if way.inputs is None else way.inputs.pool.nbytes
    engine.zero_grad()
    return figures, gradients


def at(tokens: int, here: dict[str, Way], args: argparse.Namespace, title: str, vocabulary: int) -> dict[str, Any]:
    about: dict[str, dict[str, Any]] = {}
    wanted: dict[str, Tensor] = {}
    ids = ids_of(tokens, vocabulary, 0)
    for name, way in here.items():
        try:
            about[name], gradients = kept(way, ids)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and name not in PEERS:
                raise
            way.model.engine.zero_grad()
            print(f"{title}: {name} does not run ({str(error).splitlines()[0][:120]})")
            about.pop(name, None)
            continue
        wanted = wanted or gradients
        about[name]["same_gradients"] = all(torch.equal(gradients[key], wanted[key]) for key in wanted)
    seconds: dict[str, list[float]] = {name: [] for name in about}
    for run in range(args.runs):
        ids = ids_of(tokens, vocabulary, run + 1)
        for name in list(seconds) if run % 2 == 0 else list(reversed(seconds)):
            seconds[name].append(here[name].step(ids))
    results: dict[str, Any] = {}
    for name, figures in about.items():
        figures |= {"seconds": statistics.median(seconds[name]), "hardware": _where(torch.device(args.device))}
        of = f" ({figures['kept_bytes'] / about['none']['kept_bytes']:.1%} of all)" if "none" in about else ""
        host = "" if figures["host_bytes"] is None else f", {figures['host_bytes'] / 2**20:.1f} MiB in host memory"
        peak = f", {figures['peak_bytes'] / 2**20:.0f} MiB at most" if "peak_bytes" in figures else ""
        same = "gradients as `none` to the bit" if figures["same_gradients"] else "OTHER GRADIENTS"
        print(f"{title}: {name} keeps {figures['kept_bytes'] / 2**20:.1f} MiB{of}{peak}{host}; {same}")
        results[f"{title}: {name}"] = figures
    for name in seconds:
        for other in ("none", "whole"):
            if other in seconds and name not in ("none", other):
                key = f"{title}: {name} against {other}"
                results[key] = compare(seconds[name], seconds[other])
                show(key, results[key], "s")
    return results


def _where(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}; {hardware()}" if device.type == "cuda" else hardware()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", "--model", dest="model", default="smollm2", help=f"{', '.join(SHAPES)}, or a folder")
    parser.add_argument("--layers", type=int, help="of a random shape; default: all")
    parser.add_argument("--quantization", default="nf4", choices=["none", "nf4", "int8"])
    parser.add_argument("--tokens", help="a batch, e.g. 1024,4096; default: 1024, on a GPU 1024,4096,16384")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-streamed", dest="streamed", action="store_false", help="leave streamed blocks out")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave peers out")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    tokens = args.tokens or ("1024,4096,16384" if args.device == "cuda" else "1024")
    torch.set_num_threads(args.threads)
    quiet()
    folder = folder_of(args.model, args.layers)
    options = None if args.quantization == "none" else QuantOptions(args.quantization)
    kind = torch.cuda.get_device_name().lower().replace(" ", "-") if args.device == "cuda" else "cpu"
    name = f"activations-{Path(args.model).name}-{args.quantization}-{kind}-{datetime.now(UTC).date()}.txt"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache, Tee(args.report or ROOT / "bench" / "results" / name):
        print(f"python -m bench.activations {' '.join(sys.argv[1:])}".rstrip())
        packages = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft", "trl"))
        print(f"{_where(torch.device(args.device))}; {packages}; {args.threads} threads")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        here = ways(args, folder, options, Path(cache))
        for number in tokens.split(","):
            title = f"{args.quantization}, {number} tokens a batch"
            results |= at(int(number), here, args, title, vocabulary_of(folder))
        print(f"load average {os.getloadavg()[0]:.2f} after")
        finish(results)


if __name__ == "__main__":
    main()
