"""One service a data root: a lock that lasts until the last of its processes is gone, and a note of where it is."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE = "up.json"


class AlreadyRunning(Exception):
    """Another service holds this data root."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Holds the data root. Members inherit `descriptor`, so that the lock outlives a supervisor that was killed."""

    root: Path
    descriptor: int

    @classmethod
    def take(cls, root: Path, patience: float) -> Instance:
        """Wait up to `patience` seconds for a service that is stopping; raises AlreadyRunning for one that is up."""
        descriptor = os.open(root / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pid = _supervisor(descriptor)
                if pid is not None or time.monotonic() > deadline:
                    os.close(descriptor)
                    who = f"process {pid}" if pid is not None else "processes of an earlier start that do not end"
                    raise AlreadyRunning(
                        f"eft is already up on the data root {root} ({who}); stop it first, "
                        "or give this one a data root of its own (EFT_DATA)"
                    ) from None
                if not told:
                    print("waiting for the last run to end (its worker hands its jobs back) …", flush=True)
                    told = True
                time.sleep(0.2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(root, descriptor)

    def record(self, note: Mapping[str, Any]) -> None:
        """Tell others where the service is, for this user only."""
        aside = self.root / f".{NOTE}.{os.getpid()}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(note, file)
        aside.replace(self.root / NOTE)

    def forget(self) -> None:
        (self.root / NOTE).unlink(missing_ok=True)


def _supervisor(descriptor: int) -> int | None:
    """The process in the lock file, while it lives."""
    text = os.pread(descriptor, 64, 0).decode().strip()
    try:
        state = Path(f"/proc/{int(text)}/stat").read_text().rpartition(")")[2].split()[0]
    except (ValueError, OSError):
        return None
    return None if state in "ZX" else int(text)
