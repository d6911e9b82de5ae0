"""How much of a GPU's memory is taken: a GPU is free when its trainer is dead and its memory has come back.

On AMD a SIGKILL inside a driver call can leave memory that no process owns; on such a card the next job would fail.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.hardware.discover import Gpu
from core.hardware.sources import kfd

log = logging.getLogger("eft.worker")

SLACK_BYTES = 512 << 20
"""What a driver may keep for itself after the first use of a card."""
SMI_SECONDS = 10.0
LOOK_SECONDS = 0.25


def used(gpu: Gpu, sysfs: Path) -> int | None:
    """Bytes in use by anybody; None where that cannot be read, and nothing can be said: as of a part of a card, since
    the drivers count whole ones."""
    if gpu.partition is not None:
        return None
    match gpu.vendor:
        case "amd":
            return kfd.used_bytes(gpu, sysfs)
        case "nvidia":
            return _from_smi(gpu)


def used_by_each(gpus: Sequence[Gpu], sysfs: Path) -> dict[str, int | None]:
    return {gpu.uuid: used(gpu, sysfs) for gpu in gpus}


def cleared(gpu: Gpu, sysfs: Path, before: int | None, seconds: float) -> int | None:
    """Wait until the memory is near what it was before the trainer. The bytes still taken, or None: it is clear."""
    deadline = time.monotonic() + seconds
    while True:
        now = used(gpu, sysfs)
        if before is None or now is None or now <= before + SLACK_BYTES:
            return None
        if time.monotonic() >= deadline:
            return now
        time.sleep(LOOK_SECONDS)


def _from_smi(gpu: Gpu) -> int | None:
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH"))
    if program is None:
        return None
    command = [program, f"--id={gpu.uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
        return int(done.stdout.strip()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True)
class TakenMemory:
    """A slot that is not claimed until its card's memory is down again."""

    baseline: int
    reason: str


class Quarantine:
    """Slots whose memory has not come back. Safe to use from several threads; it survives a restart by way of the
    node's row (`as_slot` is written there, `restore` reads it)."""

    def __init__(self, gpus: Mapping[str, Gpu], sysfs: Path) -> None:
        self._gpus, self._sysfs = gpus, sysfs
        self._lock = threading.Lock()
        self._held: dict[str, TakenMemory] = {}

    def __contains__(self, slot: str) -> bool:
        with self._lock:
            return slot in self._held

    def add(self, slot: str, baseline: int, taken: int) -> str:
        """Returns the reason, in words."""
        reason = (
            f"{taken >> 20} MiB of its memory were not freed after its last job (before it: {baseline >> 20}); "
            "not used until they are; reset the GPU, or reboot"
        )
        with self._lock:
            self._held[slot] = TakenMemory(baseline, reason)
        return reason

    def hold_uncleared(self, gpus: Sequence[Gpu], before: Mapping[str, int | None], seconds: float) -> None:
        """Take in those of `gpus` whose memory is not down to what it was `before` their job within `seconds`, which
        are for all of them together: the next job was promised no longer wait."""
        deadline = time.monotonic() + seconds
        for gpu in gpus:
            baseline = before[gpu.uuid]
            if baseline is None:
                continue
            taken = cleared(gpu, self._sysfs, baseline, max(0.0, deadline - time.monotonic()))
            if taken is not None:
                log.error("slot %s: %s", gpu.uuid, self.add(gpu.uuid, baseline, taken))

    def look(self) -> list[str]:
        """Let go of the slots whose memory has come back; their ids."""
        with self._lock:
            held = dict(self._held)
        free = []
        for slot, entry in held.items():
            now = used(self._gpus[slot], self._sysfs)
            if now is not None and now <= entry.baseline + SLACK_BYTES:
                free.append(slot)
        with self._lock:
            for slot in free:
                self._held.pop(slot, None)
        return free

    def as_slot(self, slot: str) -> dict[str, object]:
        """Entry of the node's row for a slot in quarantine; empty for any other slot."""
        with self._lock:
            entry = self._held.get(slot)
        return {} if entry is None else {"quarantined": entry.reason, "baseline": entry.baseline}

    def notes(self) -> list[str]:
        with self._lock:
            return [f"slot {slot} is in quarantine: {entry.reason}" for slot, entry in self._held.items()]

    def restore(self, slots: list[dict[str, object]]) -> None:
        """Take over what the worker before us knew: the memory may be taken still."""
        for entry in slots:
            name, reason, baseline = entry.get("id"), entry.get("quarantined"), entry.get("baseline")
            if isinstance(name, str) and name in self._gpus and isinstance(reason, str) and isinstance(baseline, int):
                with self._lock:
                    self._held[name] = TakenMemory(baseline, reason)
