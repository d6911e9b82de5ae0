"""Streamed blocks against resident ones: `python -m bench.memory [--quick]`, on a GPU `--device cuda --shape llama-8b`.

Three parts, each of which can be left out:

1.  Steps (forward, backward, AdamW; LoRA r 16 on all linear layers) at 1k, 4k and 16k tokens a batch of one model that
    is held resident, resident with torch's checkpoints, streamed from host memory and streamed from disk: in one
    process, in turn, over the same batches, for NF4 and bf16. Told are the ratios streamed / resident with their
    spread, the share of the blocks' bytes that is on the device (15 % at most is asked for), what was copied and how
    long the process stood still for copies; on a GPU also each one's own peak by the allocator.
2.  A shape larger than the card: under a real limit (the kernel's on a CPU, the allocator's on a GPU) that leaves room
    for half of the blocks, the resident run dies and the streamed one gives the losses of the unlimited run.
3.  Peers that keep frozen weights in host memory: accelerate's cpu_offload and DeepSpeed's ZeRO-3 with offload
    (bench/memory_peers.py), each against the same loop with all weights on the device, and ours beside them.

On a CPU device and host are one memory: a copy saves nothing there, and a ratio is what units and copies cost.

    python -m bench.memory --device cuda --shape llama-8b --quantization nf4
    python -m bench.memory --device cuda --shape llama-8b --quantization none
    python -m bench.memory --device cuda --shape llama-8b --layers 320 --ways disk --only steps    # larger than a card

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.memory_contenders import WAYS, Contender, contender
from bench.memory_ids import ids_of
from bench.memory_limit import three_runs
from bench.memory_peers import NAMES, Missing, Peer
from bench.qlora import Tee, quiet
from bench.qlora_models import ROOT, SHAPES, folder_of, vocabulary_of
from bench.report import compare, finish, hardware, show
from core.train.failures import is_out_of_memory
from core.train.quant.targets import QuantOptions

SHARE = 0.15
"""Of all blocks' frozen bytes, at most so much may be on the device."""
STREAMED = ("host", "disk")
Figures = dict[str, dict[str, Any]]


# --- 1. steps ----------------------------------------------------------------------------------------------


def steps(args: argparse.Namespace, folder: Path, cache: Path, quantization: Any) -> Figures:
    device = torch.device(args.device)
    options = None if quantization == "none" else QuantOptions(quantization)
    here: dict[str, Contender] = {}
    for how in args.ways:
        try:
            here[how] = contender(how, folder, device, options, cache, slots=args.slots)
        except (RuntimeError, MemoryError) as error:
            _out_of_memory(error, f"{how} does not load")
    results: Figures = {}
    for how in STREAMED:
        if how not in here:
            continue
        share = here[how].resident_share()
        results[f"{quantization}: share of the blocks' bytes on the device, {how}"] = share | {"wanted": SHARE}
        print(
            f"{quantization}, {how}: {args.slots} slots, {share['slot_bytes'] / 2**20:.1f} MiB, and "
            f"{share['stays_bytes'] / 2**20:.2f} MiB that stay, of {share['block_bytes'] / 2**20:.1f} MiB: "
            f"{share['share']:.1%} ({SHARE:.0%} at most is asked for)"
        )
    if device.type == "cpu":  # once for all: an allocator that grows costs nothing there
        for each in here.values():
            each.step(ids_of(args.tokens[0], vocabulary_of(folder), 0))
    for tokens in args.tokens:
        results |= _at(tokens, here, args, f"{quantization}, {tokens} tokens a batch", vocabulary_of(folder))
    for each in here.values():
        if each.streamed is not None:
            each.streamed.close()
    return results


def _at(tokens: int, here: dict[str, Contender], args: argparse.Namespace, title: str, vocabulary: int) -> Figures:
    device = torch.device(args.device)
    peaks: dict[str, int | None] = {}
    first = ids_of(tokens, vocabulary, 0)
    losses: dict[str, float] = {}
    for how, each in here.items():
        if device.type == "cpu":
            peaks[how], losses[how] = None, math.nan
            continue
        try:
            peaks[how], losses[how] = _peak(device, each, lambda each=each: each.step(first)[1])  # type: ignore[misc]
        except (RuntimeError, MemoryError) as error:
            each.engine.zero_grad()
            _out_of_memory(error, f"{title}: {how}")
    runs = args.runs if tokens < 4096 else min(args.runs, 3 if tokens < 16384 else 2)
    seconds: dict[str, list[float]] = {how: [] for how in losses}
    before = {how: _counted(here[how]) for how in losses if how in STREAMED}
    for run in range(runs):
        ids = ids_of(tokens, vocabulary, run + 1)
        for how in list(seconds) if run % 2 == 0 else list(reversed(seconds)):
            took, loss = here[how].step(ids)
            seconds[how].append(took)
            losses[how] = loss if run == 0 else losses[how]
    results: Figures = {}
    for how in before:
        copied, waited = ((now - was) / runs for now, was in zip(_counted(here[how]), before[how], strict=True))
        about: dict[str, Any] = {
            "copied_bytes_a_step": copied, "waited_seconds_a_step": waited, "tokens_per_second":
            tokens / statistics.median(seconds[how]), "peak_bytes": peaks[how], "first_loss": losses[how],
        }  # fmt: skip
        print(
            f"{title}: {how} copies {copied / 2**20:.0f} MiB a step and waits {waited:.3f} s for them"
            + (f", peak {(peaks[how] or 0) / 2**20:.0f} MiB" if device.type == "cuda" else "")
        )
        for other in ("resident", "checkpointed"):
            if other not in seconds:
                continue
            name = f"{title}: {how} against {other}"
            results[name] = compare(seconds[how], seconds[other]) | about
            results[name] |= {"peer_peak_bytes": peaks[other], "same_loss": losses[how] == losses[other]}
            results[name] |= {"hardware": _where(device)}
            show(name, results[name], "s")
        if "resident" not in seconds:
            results[f"{title}: {how}"] = about | {"seconds": statistics.median(seconds[how])}
    return results


def _counted(each: Contender) -> tuple[float, float]:
    assert each.streamed is not None
    return each.streamed.counts.bytes, each.streamed.counts.waited


def _peak(device: torch.device, each: Contender, work: Callable[[], float]) -> tuple[int | None, float]:
    """(what the contender itself has on the device at most, what `work` answers); None on a CPU."""
    if device.type != "cuda":
        return None, work()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    answer = work()
    return each.held + torch.cuda.max_memory_allocated(device) - before, answer


def _out_of_memory(error: Exception, what: str) -> None:
    """Others go on; anything but that is raised."""
    if not is_out_of_memory(error):
        raise error
    print(f"{what}: out of memory")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- 2. larger than the card -------------------------------------------------------------------------------


def larger(args: argparse.Namespace, cache: Path) -> Figures:
    name = "llama-200m" if args.device == "cpu" else args.model
    found = three_runs(folder_of(name), args.device, cache)
    whole, limit = found["block_bytes"] / 2**20, found["limit_bytes"] / 2**20
    print(f"{name} in bf16, blocks of {whole:.0f} MiB, under a limit of {limit:.0f} MiB:")
    for run in ("resident, no limit", "resident", "disk"):
        told = found[run]
        print(f"    {run:<20} {told.get('ended') or 'trained, losses ' + ', '.join(map(str, told['losses']))}")
    print("    the streamed run gives the free one's losses to the bit" if found["holds"] else "    IT DOES NOT HOLD")
    return {f"{name}: larger than the card": found}


# --- 3. peers ----------------------------------------------------------------------------------------------


def peers(args: argparse.Namespace, folder: Path, cache: Path) -> Figures:
    device = torch.device(args.device)
    ours = {how: contender(how, folder, device, None, cache, slots=args.slots) for how in ("checkpointed", "host")}
    there: dict[str, Peer] = {}
    results: Figures = {}
    for name in NAMES:
        try:
            there[name] = Peer(
                name, folder, args.device, python=args.peer_python, threads=args.threads, patience=args.patience
            )
            print(f"{name}: {there[name].about['version'] or 'PEFT ' + version('peft')}")
        except Missing as missing:
            results[f"peer {name}"] = {"left_out": str(missing)}
            print(f"{name}: left out: {missing}")
    vocabulary = vocabulary_of(folder)
    for tokens in args.peer_tokens:
        seconds: dict[str, list[float]] = {}
        peaks: dict[str, float | None] = {}
        for run in range(-1, args.peer_runs):  # the first one warms up
            names = [*ours, *there]
            for name in names if run % 2 else names[::-1]:
                try:
                    took, peaks[name] = _turn(ours, there, name, tokens, run + 1, vocabulary)
                except Missing as missing:
                    results[f"peer {name}, {tokens} tokens a batch"] = {"left_out": str(missing)}
                    print(f"{name}, {tokens} tokens a batch: left out: {missing}")
                    del there[name]
                    seconds.pop(name, None)
                    continue
                if run >= 0:
                    seconds.setdefault(name, []).append(took)
        pairs = [("host", "checkpointed"), ("accelerate", "plain"), ("deepspeed", "plain")]
        pairs += [("host", "accelerate"), ("host", "deepspeed")]
        for mine, other in pairs:
            if mine in seconds and other in seconds:
                name = f"bf16, {tokens} tokens a batch: {mine} against {other}"
                results[name] = compare(seconds[mine], seconds[other]) | {
                    "peak_bytes": peaks[mine], "peer_peak_bytes": peaks[other], "hardware": _where(device),
                }  # fmt: skip
                show(name, results[name], "s")
    for peer in there.values():
        peer.close()
    streamed = ours["host"].streamed
    assert streamed is not None
    streamed.close()
    return results


def _turn(
    ours: dict[str, Contender], there: dict[str, Peer], name: str, tokens: int, seed: int, vocabulary: int
) -> tuple[float, float | None]:
    if name in there:
        answer = there[name].step(tokens, seed)
        return answer["seconds"], answer["peak_bytes"]
    each = ours[name]
    took: list[float] = []

    def work() -> float:
        seconds, loss = each.step(ids_of(tokens, vocabulary, seed))
        took.append(seconds)
        return loss

    peak, _ = _peak(each.engine.device, each, work)
    return took[0], peak


# --- all ---------------------------------------------------------------------------------------------------


def _where(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}; {hardware()}" if device.type == "cuda" else hardware()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", "--shape", default="llama-10m", help=f"smollm2, {', '.join(SHAPES)}, or a folder")
    parser.add_argument("--layers", type=int, help="of a random shape; default: all")
    parser.add_argument("--quantization", nargs="+", default=["nf4", "none"], choices=["none", "nf4", "int8"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--only", nargs="+", default=["steps", "larger", "peers"], choices=["steps", "larger", "peers"])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tokens", type=_numbers, default=[1024, 4096, 16384], help="a batch, e.g. 1024,4096")
    parser.add_argument("--runs", type=int, default=5, help="of each way; 3 at most at 4k, 2 at 16k tokens")
    parser.add_argument("--peer-tokens", type=_numbers, help="default: 1024; on a GPU as --tokens")
    parser.add_argument("--peer-runs", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a peer may take for a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="NF4 at 1k tokens and the larger shape: about a minute")
    parser.add_argument("--report", type=Path, help="default bench/results/memory-<model>-<device>-<day>.txt")
    args = parser.parse_args()
    if args.quick:
        args.quantization, args.tokens, args.runs, args.only = ["nf4"], [1024], 2, ["steps", "larger"]
    if args.peer_tokens is None:
        args.peer_tokens = args.tokens if args.device == "cuda" else [1024]
    return args


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    quiet()
    kind = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    folder = folder_of(args.model, args.layers)
    label = folder.name if args.model in SHAPES else Path(args.model).name
    day = datetime.now(UTC).date()
    report = args.report or ROOT / "bench" / "results" / f"memory-{label}-{kind.lower().replace(' ', '-')}-{day}.txt"
    results: Figures = {}
    with tempfile.TemporaryDirectory() as cache, Tee(report):
        print(f"python -m bench.memory {' '.join(sys.argv[1:])}".rstrip())
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "accelerate"))
        print(f"{_where(torch.device(args.device))}; {packages}; {args.threads} threads")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        if "steps" in args.only:
            for quantization in args.quantization:
                results |= steps(args, folder, Path(cache), quantization)
                gc.collect()
        if "larger" in args.only:
            results |= larger(args, Path(cache))
        if "peers" in args.only:
            results |= peers(args, folder, Path(cache))
        print(f"load average {os.getloadavg()[0]:.2f} after")
        finish(results)


if __name__ == "__main__":
    main()
