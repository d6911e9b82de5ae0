"""Snapshots of a session: all of its adapters as they were after one operation of its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core import removal
from core.train.checkpoint import store
from core.train.session.adapter import SessionAdapter
from core.train.session.verbs import SessionVerbs

KEEP = 2
_PREFIX = "position-"
_ABOUT = "session.json"


def write_snapshot(folder: Path, verbs: SessionVerbs, position: int) -> None:
    """Write the state after the operation at `position`, and remove older snapshots but one."""
    root = folder / "snapshots"
    name = f"{_PREFIX}{position:012d}"
    if not (root / name).exists():

        def fill(making: Path) -> None:
            for model, adapter in verbs.adapters.items():
                adapter.save(making, f"model-{model}")
            about = {"position": position, "models": list(verbs.adapters)}
            (making / _ABOUT).write_text(json.dumps(about), encoding="utf-8")

        store.write(root, name, fill)
    for old in _newest_first(root)[KEEP:]:
        removal.remove(old, "tmp-")


def load_snapshot(folder: Path, verbs: SessionVerbs) -> tuple[int, list[str]]:
    """Restore the newest snapshot that is whole: its position (0: there is none), and what was wrong with newer ones,
    which are set aside."""
    faults = []
    for path in _newest_first(folder / "snapshots"):
        if (fault := store.fault(path)) is not None:
            faults.append(f"{path.name}: {fault}")
            store.quarantine(path)
            continue
        about: dict[str, Any] = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
        for model in about["models"]:
            key, stem = verbs.key(model), f"model-{model}"
            verbs.adapters[model] = SessionAdapter.restore(verbs.base, model, key, path, stem)
        return int(about["position"]), faults
    return 0, faults


def _newest_first(root: Path) -> list[Path]:
    return sorted(root.glob(f"{_PREFIX}*"), reverse=True) if root.is_dir() else []
