"""The run record: what one would need to know to do the run again."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import core
from core.hardware.tables import faults
from core.train.model.placement import Placement

PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")
DRIFT = ("device", "device_name", "arch", "precision", "weights_dtype", "attention", "tf32", "threads", "versions")
"""What must be the same for a resumed run to be equal to the bit."""


def versions() -> dict[str, str]:
    found = {"eft": core.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _faults(arch: str) -> list[dict[str, Any]]:
    """What is known to go wrong on this architecture, with the variables that stand against it in this process."""
    return [
        {"key": fault.key, "kind": fault.kind, "variables": {name: os.environ.get(name) for name in fault.set}}
        for fault in faults.known(arch)
    ]


class Environment:
    """A stateful part: remembers where the run was before, so that a change is reported."""

    def __init__(self, placement: Placement) -> None:
        self.here: dict[str, Any] = placement.as_dict() | {
            "versions": versions(),
            "faults": _faults(placement.arch),
            "limits": asdict(placement.limits),
        }
        self.before: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.here

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def drift(self) -> list[str]:
        """What is not as it was, in words; empty for an exact resume."""
        if self.before is None:
            return []
        changes: list[str] = []
        for key in DRIFT:
            if key not in self.before:  # a checkpoint of a version that did not know it yet
                continue
            then, now = self.before[key], self.here.get(key)
            if isinstance(then, dict) and isinstance(now, dict):
                changes += [f"{k} was {then.get(k)}, is {now[k]}" for k in now if then.get(k) != now[k]]
            elif then != now:
                changes.append(f"{key} was {then}, is {now}")
        return changes
