"""A QLoRA step against its peers: `python -m bench.qlora [--model smollm2|llama-1b|llama-8b|mud-puppy|DIR]`.

`--layers N` cuts a random shape down to what fits the machine, and the report says so. A batch of 1k tokens is the
default (4 rows of 256), one of 8k is `--rows 8 --tokens 1024`.

All contenders (bench/qlora_peers.py says what each is) sit in one process (Unsloth, which changes the others' code, in
one of its own) and take turns on the same batches of random ids; the order is swapped every run, and ratios are taken
pair by pair. The memory of each is measured in a process of its own: the peak of two steps over what the loaded model
takes. The same command runs on CPU and GPU.

The machine's load is told beside the figures, and each ratio is given in wall time and, on a CPU, in processor time:
other programs disturb the second less. `interval` is the middle 95 % of 2,000 bootstrapped medians of the pairs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.qlora_children import APART, Apart, memory_in_child, memory_of, serve
from bench.qlora_models import ROOT, SHAPES, folder_of, vocabulary_of
from bench.qlora_peers import NAMES, OURS, Missing, Shape, Step, batches, build
from bench.report import compare, finish, show


def _timed(step: Step, ids: Tensor, device: torch.device) -> tuple[float, float]:
    started, processor = time.perf_counter(), time.process_time()
    step(ids)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, step.processor if isinstance(step, Apart) else time.process_time() - processor


def _interval(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    draw = random.Random(0)  # noqa: S311 -- a bootstrap, no secret
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, llama-1b, llama-8b, mud-puppy, or a folder")
    parser.add_argument("--layers", type=int, help="of a random shape; default: all")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--rows", type=int, help="default 4; mud-puppy's micro-benchmark has 1")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    default = ["ours", "apart", "trl", "tuned", "bare", "lora", "unsloth"]
    parser.add_argument("--only", nargs="*", default=default, choices=NAMES)
    parser.add_argument("--apart", nargs="*", default=list(APART), choices=NAMES, help="in a process of their own")
    parser.add_argument("--memory-of", choices=NAMES, help="of a child")
    parser.add_argument("--serve", choices=NAMES, help="of a child")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--report", type=Path, help="default bench/results/qlora-<model>-<device>-<day>.txt")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (1 if arguments.model == "mud-puppy" else 4)
    torch.set_num_threads(arguments.threads)
    quiet()
    shape = Shape(arguments.rows, arguments.tokens, arguments.r, torch.device(arguments.device))
    folder = folder_of(arguments.model, arguments.layers)
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of, folder, shape)))
        return
    if arguments.serve:
        serve(arguments.serve, folder, shape, arguments.runs)
        return
    day = datetime.now(UTC).date()
    kind = torch.cuda.get_device_name() if shape.device.type == "cuda" else "cpu"
    label = folder.name if arguments.model in SHAPES else Path(arguments.model).name
    report = arguments.report or ROOT / "bench" / "results" / (
        f"qlora-{label}-{kind.lower().replace(' ', '-')}-{day}.txt"
    )
    with Tee(report):
        _compare(arguments, folder, shape, kind, label)


def _compare(arguments: argparse.Namespace, folder: Path, shape: Shape, kind: str, label: str) -> None:
    print(f"python -m bench.qlora {' '.join(sys.argv[1:])}".rstrip())
    print(_versions(kind, shape, arguments))
    print(f"load average {os.getloadavg()[0]:.2f} before")
    first, *rest = all_batches = batches(shape, arguments.runs + 1, vocabulary_of(folder))
    memory: dict[str, dict[str, float]] = {}
    steps: dict[str, Step] = {}
    for name in [name for name in NAMES if name in arguments.only]:
        try:
            alone = name in arguments.apart
            steps[name] = Apart(name, arguments) if alone else build(name, folder, shape, all_batches)
        except Missing as missing:
            print(f"{name:<10} left out: {missing}")
    names = list(steps)
    losses = {name: float(step(first)) for name, step in steps.items()}  # also the warm-up
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for run, ids in enumerate(rest):
        for name in names if run % 2 == 0 else names[::-1]:
            seconds, processor = _timed(steps[name], ids, shape.device)
            wall[name].append(seconds)
            cpu[name].append(processor)
    print(f"load average {os.getloadavg()[0]:.2f} after the steps")
    for step in steps.values():
        if isinstance(step, Apart):
            step.close()
    steps.clear()
    gc.collect()
    if not arguments.no_memory:
        memory = {name: memory_in_child(name, arguments) for name in names}

    tokens = shape.rows * shape.tokens
    for name in names:
        rate = tokens / statistics.median(wall[name])
        mib = f", memory {memory[name]['over_load']:.0f} MiB over {memory[name]['loaded']:.0f}" if memory else ""
        print(f"{name:<10} {rate:8.1f} tokens/s, first loss {losses[name]:.5f}{mib}")
    results: dict[str, dict[str, Any]] = {}
    for mine in [name for name in ("ours", "selective") if name in names]:
        said = label if mine == "ours" else f"{label}, {mine}"
        for name in names:
            if name == mine or (mine != "ours" and name in OURS):
                continue
            for what, series in (("step", wall), ("step, CPU time", cpu))[: 2 if shape.device.type == "cpu" else 1]:
                low, high = _interval(series[mine], series[name])
                title = f"{said}: {what}, against {name}"
                results[title] = compare(series[mine], series[name])
                results[title] |= {"interval": [low, high], "hardware": _where(kind)}
                show(title, results[title], "s")
                print(f"{'':<52} interval {low:.3f} to {high:.3f}")
            results[f"{said}: step, against {name}"] |= {
                "first_loss_difference": abs(losses[mine] - losses[name]),
                "tokens_per_second": tokens / statistics.median(wall[mine]),
                "peer_tokens_per_second": tokens / statistics.median(wall[name]),
            }
            if memory:
                ours, peer = memory[mine]["over_load"], memory[name]["over_load"]
                results[f"{said}: step, against {name}"] |= {"mib_over_load": ours, "peer_mib_over_load": peer}
                title = f"{said}: peak memory over load, against {name}"
                results[title] = compare([ours], [peer]) | {"hardware": _where(kind)}
                show(title, results[title], "MiB")
    finish(results)


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore", FutureWarning)


def _versions(kind: str, shape: Shape, arguments: argparse.Namespace) -> str:
    from importlib.metadata import version

    cut = f", cut to {arguments.layers} layers" if arguments.layers else ""
    packages = ", ".join(f"{name} {version(name)}" for name in ("bitsandbytes", "peft", "trl", "transformers"))
    return (
        f"{_where(kind)}; torch {torch.__version__}, {packages}; {torch.get_num_threads()} threads\n"
        f"{arguments.model}{cut}: {shape.rows} × {shape.tokens} random tokens, all labelled, r {shape.r} on all linear "
        "layers, activation checkpointing (non-reentrant), bfloat16 products, AdamW, gradients clipped to 1"
    )


def _where(kind: str) -> str:
    from bench.report import hardware

    return hardware() if kind == "cpu" else f"{kind}; {hardware()}"


class Tee:
    """Standard output goes to the report too; libraries' warnings do not."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        self._stdout = sys.stdout
        sys.stdout = self

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._stdout
        self._file.close()

    def write(self, text: str) -> int:
        self._file.write(text)
        written = self._stdout.write(text)
        self.flush()  # a bench of minutes is watched
        return written

    def flush(self) -> None:
        self._file.flush()
        self._stdout.flush()


if __name__ == "__main__":
    main()
