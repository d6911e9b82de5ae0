"""What this box's GPUs do now, for the node's row: asked at every sweep, where that is cheap."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from core.hardware import gpu_activity
from core.hardware.discover import Gpu
from core.hardware.sources.live import NOTHING, Live

log = logging.getLogger("eft.worker")

PROGRAM_SECONDS = 10.0
AMD_SMI_EVERY = 60.0
"""It takes a second of a core each time; the kernel's files take none, and nvidia-smi little."""
METRICS: Mapping[str, Callable[[Sequence[int]], float]] = {
    "gpu_busy_percent": fmean,
    "gpu_celsius": max,
    "gpu_watts": sum,
}
"""Metric → how figures of several GPUs become one; the name behind `gpu_` is that of `Live`."""


class GpuStats:
    """One thread looks; others may read."""

    def __init__(self, gpus: Mapping[str, Gpu], sysfs: Path) -> None:
        self._gpus, self._sysfs = list(gpus.values()), sysfs
        self._found: Mapping[str, Live] = {}
        self._next_amd_smi = 0.0
        self._failed: list[str] = []

    def look(self) -> None:
        """Read the figures again. A failing source is logged once."""
        if not self._gpus:
            return
        now = time.monotonic()
        ask_it = now >= self._next_amd_smi
        if ask_it:
            self._next_amd_smi = now + AMD_SMI_EVERY
        found, failed = gpu_activity.look(self._gpus, self._sysfs, os.environ, PROGRAM_SECONDS, amd_smi=ask_it)
        if not ask_it:  # what it said last stands until it is asked again
            told = {gpu.uuid for gpu in self._gpus if gpu.vendor == "amd"} - set(found)
            found |= {uuid: self._found[uuid] for uuid in told if uuid in self._found}
        for words in failed:
            if words not in self._failed:
                log.warning("the utilization of the GPUs is unknown: %s", words)
        self._found, self._failed = found, failed

    def metrics(self, gpus: Sequence[Gpu]) -> dict[str, float]:
        """The same as metrics of a job on these GPUs: mean load, highest temperature, power of all. What is not known
        of each of them is left out."""
        found = [self._found.get(gpu.uuid, NOTHING) for gpu in gpus]
        values: dict[str, float] = {}
        for name, together in METRICS.items():
            known = [value for live in found if (value := getattr(live, name.removeprefix("gpu_"))) is not None]
            if known and len(known) == len(gpus):
                values[name] = float(together(known))
        return values

    def of(self, gpu: Gpu) -> dict[str, Any]:
        """Entry for `gpu` in the node's row; empty if nothing is known."""
        known = self._found.get(gpu.uuid)
        return {} if known is None else {"live": asdict(known)}
