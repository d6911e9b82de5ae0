"""Processes that use this box's GPUs beside eft: they have a compute context and are no children of this worker.

A GPU that somebody uses beside eft is busy: nothing is claimed on it until they have gone, and the node's row says who
they are. The kernel (AMD) and nvidia-smi (NVIDIA) are asked.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.hardware.discover import Gpu
from core.hardware.sources import kfd, nvidia
from worker import processes

log = logging.getLogger("eft.worker")

MOST = 8
"""Processes that are shown of one GPU."""


STEP_BYTES = 1 << 28
"""Memory is shown in such steps, so that the node's row is not rewritten at every look."""


class ForeignProcesses:
    """Safe to read from several threads; one of them looks."""

    def __init__(self, gpus: Mapping[str, Gpu], sysfs: Path) -> None:
        self._gpus, self._sysfs = gpus, sysfs
        self._found: Mapping[str, list[dict[str, Any]]] = {}
        self._failed: str | None = None

    def look(self) -> None:
        """Read the processes again. A failing source is logged once."""
        told: dict[str, dict[int, int]] = {}
        failed = None
        if any(gpu.vendor == "nvidia" for gpu in self._gpus.values()):
            told, failed = nvidia.processes(os.environ, self._sysfs.parent)
        found: dict[str, list[dict[str, Any]]] = {}
        for slot, gpu in self._gpus.items():
            match gpu.vendor:
                case "nvidia":
                    there = told.get(gpu.uuid, {})
                case "amd":
                    there = kfd.processes(gpu, self._sysfs) or {}
            outside = [(pid, count) for pid, count in sorted(there.items()) if not processes.descends(pid, os.getpid())]
            if outside:
                found[slot] = [_described(pid, count) for pid, count in outside[:MOST]]
        self._found = found
        if failed is not None and failed != self._failed:
            log.warning("cannot see who else uses the GPUs: %s", failed)
        self._failed = failed

    def __contains__(self, slot: str) -> bool:
        return slot in self._found

    def as_slot(self, slot: str) -> dict[str, Any]:
        """Entry of the node's row; empty for a GPU that only eft uses."""
        found = self._found.get(slot)
        return {} if found is None else {"processes": found}


def _described(pid: int, count: int) -> dict[str, Any]:
    """What is known of a process; only its number where it lives in another PID namespace."""
    folder = processes.PROC / str(pid)
    user = name = None
    try:
        uid = folder.stat().st_uid
        name = (folder / "comm").read_text().strip()
        user = str(uid)
        user = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        pass  # it has ended, is not ours to see, or its user has no name here
    return {"pid": pid, "user": user, "name": name, "bytes": count & ~(STEP_BYTES - 1)}
