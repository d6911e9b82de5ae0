"""Compiled blocks against the same blocks as they are (`training.compile`): `python -m bench.compile`.

One model with LoRA r 16 on all linear layers; steps of forward, backward and AdamW in turn over the same batches, in
one process: `ours` has compiled blocks, `peer` calls the same blocks as they are. The start is measured twice: with
nothing kept, and with the code that the first one kept. The step from which it pays is the start divided by what a step
saves, by the clock and by processor time, which other work on the machine changes less. The difference that compiling
makes to the first loss is stated.

    python -m bench.compile
    python -m bench.compile --models smollm2 --quantization nf4 --rows 4 --tokens 256

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.memory_contenders import Contender, contender
from bench.qlora import Tee, quiet
from bench.qlora_models import ROOT, SHAPES, folder_of, vocabulary_of
from bench.report import compare, finish, hardware, show
from core.train.compiling.cache import compiled_code, compiler_here
from core.train.compiling.prepare import try_blocks
from core.train.compiling.regions import Compiler, Region
from core.train.memory.streaming.blocks import find_blocks
from core.train.quant.targets import QuantOptions
from tests.support import models

EAGER = "the bench calls the block as it is"


def folder(name: str) -> Path:
    """`tiny` is the model of the tests; other names are those of bench/qlora_models.py."""
    return models.folder() / "tiny" if name == "tiny" else folder_of(name)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, and the processor time of this process and of its children (compilers) until then, seconds."""

    clock: float
    processor: float

    @classmethod
    def now(cls) -> Moment:
        used = os.times()
        return cls(time.perf_counter(), used.user + used.system + used.children_user + used.children_system)

    def since(self) -> tuple[float, float]:
        """(by the clock, of the processor) from then until now."""
        now = self.now()
        return now.clock - self.clock, now.processor - self.processor


def start(here: Contender, cache: Path, rows: int, stack: ExitStack) -> tuple[tuple[float, float], list[Region], int]:
    """(time by both clocks, the blocks, graphs) of compiling with the code that `cache` has."""
    began = Moment.now()
    stack.enter_context(compiled_code(cache, "bench"))
    compiler = Compiler(several_rows=rows > 1, sign_of_life=lambda: None)
    regions = []
    for name, block in find_blocks(here.engine.model):
        regions.append(Region(name, block, compiler))
        stack.callback(regions[-1].release)
    why = try_blocks(here.engine, compiler)
    why = why or next((region.why_eager for region in regions if region.why_eager is not None), None)
    if why is not None:
        raise SystemExit(f"the blocks are not compiled: {why}")
    compiler.close(lambda block, reason: sys.exit(f"{block} has no code: {reason}"))
    return began.since(), regions, len(compiler.graphs)


def at(name: str, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Figures of one model."""
    device = torch.device(args.device)
    options = None if args.quantization == "none" else QuantOptions(args.quantization)
    here = contender(
        "checkpointed" if args.checkpointing else "resident", folder(name), device, options, cache, slots=2
    )
    vocabulary = vocabulary_of(folder(name))
    with ExitStack() as stack:
        cold, _, graphs = start(here, cache, args.rows, stack)
    with ExitStack() as stack:
        warm, regions, _ = start(here, cache, args.rows, stack)
        losses: dict[bool, float] = {}
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(args.runs + 1):
            for compiled in (True, False) if number % 2 == 0 else (False, True):
                for region in regions:
                    region.why_eager = None if compiled else EAGER
                if number == 0:  # not timed: memory is taken, and the optimizer's state is made
                    losses[compiled] = loss_of(here, batch(0, args, vocabulary))
                before = Moment.now()
                here.step(batch(number, args, vocabulary))
                if number > 0:
                    times[compiled].append(before.since())
    title = f"{name}, {args.quantization}, {args.rows} × {args.tokens} tokens"
    results: dict[str, Any] = {}
    for place, clock in enumerate(("", ", processor time")):
        found = compare([each[place] for each in times[True]], [each[place] for each in times[False]])
        show(title + clock, found, "s")
        starts = (cold[place], warm[place])
        print(f"{title}{clock}: start {starts[0]:.1f} s with nothing kept, {starts[1]:.1f} s with kept code")
        saved = found["peer"] - found["ours"]
        pays = [math.ceil(seconds / saved) if saved > 0 else None for seconds in starts]
        if saved > 0:
            print(f"{title}{clock}: it pays from step {pays[0]:,} on, with kept code from step {pays[1]:,} on")
        else:
            print(f"{title}{clock}: it does not pay; a step takes {-saved:.3f} s longer")
        results[title + clock] = found | {"start": starts, "pays_from": pays, "graphs": graphs}
    gap = abs(losses[True] - losses[False])
    print(f"{title}: {graphs} graphs; first loss {losses[True]:.6f} compiled, {losses[False]:.6f} as it is")
    results[title]["loss_gap"] = gap
    return results


def loss_of(here: Contender, ids: Tensor) -> float:
    """Loss in training mode, without a step."""
    from core.train.batch import IGNORE_INDEX, Batch

    rows, length = ids.shape
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    return float(here.forward(Batch(ids, labels, (length,) * rows, rows * (length - 1))).detach())


def batch(number: int, args: argparse.Namespace, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, vocabulary, (args.rows, args.tokens), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default="tiny,smollm2", help=f"of tiny, smollm2, {', '.join(SHAPES)}, or folders")
    parser.add_argument("--quantization", default="none", choices=["none", "nf4", "int8"])
    parser.add_argument("--checkpointing", action="store_true", help="blocks keep their inputs alone")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quiet()
    kind = torch.cuda.get_device_name().lower().replace(" ", "-") if args.device == "cuda" else "cpu"
    report = args.report or ROOT / "bench" / "results" / f"compile-{kind}-{datetime.now(UTC).date()}.txt"
    results: dict[str, Any] = {}
    with Tee(report):
        print(f"python -m bench.compile {' '.join(sys.argv[1:])}".rstrip())
        packages = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft"))
        print(f"{hardware()}; {packages}; {compiler_here() or 'no C++ compiler'}; {args.threads} threads")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        for name in args.models.split(","):
            with tempfile.TemporaryDirectory() as cache:
                results |= at(name, args, Path(cache))
        print(f"load average {os.getloadavg()[0]:.2f} after")
        finish(results)


if __name__ == "__main__":
    main()
