"""What every bench shares: figures in turn, ratios with their spread, one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def hardware() -> str:
    """Processor, cores and memory, in words; benches that use a GPU add its name."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB"


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of each GPU, in torch's order; none where torch sees none. Asked in a process of its own, which
    gives the memory of its driver back, and after which this one can still be forked."""
    code = "import json, torch; c = torch.cuda; every = map(c.get_device_properties, range(c.device_count()))"
    code += "; print(json.dumps([(one.name, one.total_memory) for one in every]))"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    return [(name, size) for name, size in json.loads(told)]


def seconds(device: str) -> float:
    """A reading of the clock; figures are differences of two. On a CPU it is the processor time of this process, which
    other programs disturb less than the time by the clock; on a GPU the latter, once all work is done."""
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize(device)
    return time.perf_counter()


class Children:
    """Seconds since this was made."""

    def __init__(self) -> None:
        self._began, self._spent = time.monotonic(), self._of_children()

    @staticmethod
    def _of_children() -> float:
        spent = os.times()
        return spent.children_user + spent.children_system

    @property
    def clock(self) -> float:
        return time.monotonic() - self._began

    @property
    def processor(self) -> float:
        """Of child processes that have ended and were waited for."""
        return self._of_children() - self._spent


def in_turn(ours: Callable[[], float], peer: Callable[[], float], runs: int) -> dict[str, Any]:
    """Run ours and the peer alternately (order swapped every time), so that both meet the machine's moods alike.

    Each call returns its own figure. The ratio is taken pair by pair; its spread is that of the pairs.
    """
    mine, theirs = [], []
    for run in range(runs):
        if run % 2 == 0:
            mine.append(ours())
            theirs.append(peer())
        else:
            theirs.append(peer())
            mine.append(ours())
    return compare(mine, theirs)


def compare(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Medians of two paired series, and the ratio of the pairs with its spread."""
    ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
    return {
        "ours": statistics.median(mine),
        "peer": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "runs": len(ratios),
        "hardware": hardware(),
    }


def show(name: str, figures: dict[str, Any], unit: str) -> None:
    spread = f"{figures['ratio_min']:.3f} to {figures['ratio_max']:.3f}, {figures['runs']} runs"
    print(
        f"{name:<52} ours {figures['ours']:10.4g} {unit}   peer {figures['peer']:10.4g} {unit}   "
        f"ratio {figures['ratio']:.3f} ({spread})",
        flush=True,
    )


def finish(results: dict[str, dict[str, Any]]) -> None:
    """The last line: one JSON object."""
    print(json.dumps(results, sort_keys=True))


def conclude(lines: list[str], wrong: list[str], result: dict[str, Any], spent: Children, out: Path | None) -> int:
    """Print, and write to `out`, the report of a bench that looks for wrong runs: its lines, those of the wrong runs,
    the time, and one JSON object. The exit code: 1 where a run is wrong."""
    processor = spent.processor
    whole = [*lines, *(["", *wrong] if wrong else []), "", f"{spent.clock:.0f} s, {processor:.0f} s of CPU", ""]
    text = "\n".join([*whole, json.dumps(result | {"wrong": len(wrong), "cpu_seconds": round(processor)})]) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return int(bool(wrong))
