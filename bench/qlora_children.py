"""Processes of bench/qlora.py: one for the memory of each contender, one for whoever must not run beside the others.

Unsloth replaces methods of transformers' and TRL's classes when it is imported: whoever ran beside it would be measured
with its code.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import process
from bench.qlora_models import vocabulary_of
from bench.qlora_peers import Missing, Shape, batches, build

APART = ("unsloth",)
MEMORY_STEPS = 2


def command(arguments: argparse.Namespace, *more: str) -> list[str]:
    """The same bench for a child."""
    return [
        sys.executable, "-m", "bench.qlora", "--model", arguments.model, "--rows", str(arguments.rows),
        "--tokens", str(arguments.tokens), "--r", str(arguments.r), "--device", arguments.device,
        "--threads", str(arguments.threads), "--runs", str(arguments.runs),
        *(["--layers", str(arguments.layers)] if arguments.layers else []), *more,
    ]  # fmt: skip


# --- memory ----------------------------------------------------------------------------------------


def memory_of(name: str, folder: Path, shape: Shape) -> dict[str, float]:
    """MiB: the loaded model with adapters and optimizer, and the peak of the steps over it."""
    ids = batches(shape, MEMORY_STEPS, vocabulary_of(folder))
    step = build(name, folder, shape, ids)
    gc.collect()
    _touch()
    on_gpu = shape.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        process.reset_peak()
    loaded = torch.cuda.memory_allocated() if on_gpu else process.resident()
    for batch in ids:
        step(batch)
    peak = torch.cuda.max_memory_allocated() if on_gpu else process.peak()
    return {"loaded": loaded / 2**20, "over_load": (peak - loaded) / 2**20}


def _touch() -> None:
    """Read a byte of every page of every tensor: what a loader has only mapped is of the load, and not of a step."""
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = torch.empty(0, dtype=torch.uint8).set_(thing.detach().untyped_storage())
            storage[:: os.sysconf("SC_PAGE_SIZE")].sum()


def memory_in_child(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """What `memory_of` answers in a process of its own."""
    done = subprocess.run(command(arguments, "--memory-of", name), check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- steps -----------------------------------------------------------------------------------------


class Apart:
    """A contender in a process of its own: a line to it is one step, its answer comes when the device has done it.

    Missing when it cannot run here."""

    processor = 0.0
    """Seconds of processor time that its last step took."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._child = subprocess.Popen(
            command(arguments, "--serve", name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if missing := self._answer()["missing"]:
            self.close()
            raise Missing(missing)

    def __call__(self, ids: Tensor) -> Tensor:
        """`ids` are the next of the batches, which the child has made for itself."""
        assert self._child.stdin is not None
        self._child.stdin.write("step\n")
        self._child.stdin.flush()
        answer = self._answer()
        self.processor = float(answer["processor"])
        assert answer["sum"] == int(ids.sum())
        return torch.tensor(float(answer["loss"]))

    def close(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender's process ended with exit code {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(name: str, folder: Path, shape: Shape, runs: int) -> None:
    """The child's side. What libraries print goes to standard error."""
    answers = sys.stdout

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    with redirect_stdout(sys.stderr):
        ids = batches(shape, runs + 1, vocabulary_of(folder))
        try:
            step = build(name, folder, shape, ids)
        except Missing as missing:
            answer(missing=str(missing))
            return
        answer(missing=None)
        for batch, _ in zip(ids, sys.stdin, strict=False):
            began = time.process_time()
            loss = float(step(batch))
            if shape.device.type == "cuda":
                torch.cuda.synchronize()
            answer(loss=loss, sum=int(batch.sum()), processor=time.process_time() - began)
