"""What this box's GPUs do now, for the node's row: asked at every sweep, where that is cheap."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.hardware import gpu_activity
from core.hardware.discover import Gpu
from core.hardware.sources.live import Live

log = logging.getLogger("eft.worker")

PROGRAM_SECONDS = 10.0
AMD_SMI_EVERY = 60.0
"""It takes a second of a core each time; the kernel's files take none, and nvidia-smi little."""


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

    def of(self, gpu: Gpu) -> dict[str, Any]:
        """Entry for `gpu` in the node's row; empty if nothing is known."""
        known = self._found.get(gpu.uuid)
        return {} if known is None else {"live": asdict(known)}
