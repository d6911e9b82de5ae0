"""The run record: what one would need to know to do the run again."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import core
from core.hardware.tables import faults
from core.plan.drift import Drifted, compare
from core.train.model.placement import Placement

PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")


@cache
def versions() -> Mapping[str, str]:
    """Version of eft, of Python and of each package that computes; "absent" for one that is not installed."""
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


def _hashes(told: Mapping[str, Any] | None) -> list[str]:
    """SHA-256 of every file that was read, in order."""
    found: list[str] = []
    for source in [] if told is None else told.get("sources") or [told]:
        value = source.get("sha256")
        found += [] if value is None else [value] if isinstance(value, str) else value
    return found


class Environment:
    """A stateful part: remembers where the run was before, so that a change is reported."""

    def __init__(self, placement: Placement) -> None:
        self.here: dict[str, Any] = placement.as_dict() | {
            "versions": dict(versions()),
            "faults": _faults(placement.arch),
            "limits": asdict(placement.limits),
        }
        self.before: dict[str, Any] | None = None

    def describe(self, record: Mapping[str, Any], driver: str | None) -> None:
        """Remember what the run is made of: entries of the run record, and the driver of its device."""
        base, data = record["model"], record["data"]
        self.here = self.here | {
            "base": base.get("commit") or base.get("sha256"),
            "data": {"train": _hashes(data["train"]), "eval": _hashes(data["eval"])},
            "spec": record["spec"],
            "code": record["code"],
            "driver": driver,
            "ranks": 1 if record["ranks"] is None else record["ranks"]["world_size"],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.here

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def drift(self, but: Collection[str] = ()) -> list[Drifted]:
        """What is not as it was (core/plan/drift.py); empty for an exact resume, and where nothing was loaded. `but`:
        paths that were changed on purpose."""
        return [] if self.before is None else compare(self.before, self.here, but)
