"""Folders of checkpoints that are complete or not there.

A checkpoint is written to a folder aside, every file is synced, `manifest.json` gets size and SHA-256 of each, the
folder is renamed, its parent is synced. A crash at any point leaves at most a folder whose name starts with `tmp-`,
which nobody reads. Names sort by progress: `step-00000050`, and `step-00000050-micro-0003` inside a window. Beside
them `best-00000040` holds the weights alone of an evaluation that was the best.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.spec.run import UNFINISHED
from core.train.files import sha256, sync

MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d{8,})(?:-micro-(\d{4,}))?$")
_BEST = re.compile(r"^best-(\d{8,})$")


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    step: int
    micro: int


def name_of(step: int, micro: int) -> str:
    """Folder name after `step` optimizer steps and `micro` backward passes of the next."""
    return f"step-{step:08d}" + (f"-micro-{micro:04d}" if micro else "")


def best_name(step: int) -> str:
    return f"best-{step:08d}"


def write(root: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Make checkpoint `name` below `root` from what `fill` writes into a folder. OSError when the disk refuses:
    then nothing complete has appeared and the older checkpoints are untouched."""
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f"{UNFINISHED}{name}-{os.getpid()}"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    try:
        fill(aside)
        files = sorted(path for path in aside.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        (aside / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), encoding="utf-8")
        for path in [*files, aside / MANIFEST, aside]:
            sync(path)
        final = root / name
        if final.exists():  # the same state, written before
            shutil.rmtree(final)
        aside.rename(final)
        sync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def prune(root: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints of a folder, and folders left aside by a crash."""
    for old in newest_first([root])[keep_last:]:
        shutil.rmtree(old.path)
    for left in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)


def prune_best(root: Path, keep: Collection[int]) -> None:
    """Remove the weights of evaluations that nobody would call the best any more: all but those of the steps `keep`."""
    for path in sorted(root.iterdir()):
        if (match := _BEST.match(path.name)) and int(match[1]) not in keep:
            shutil.rmtree(path)


def newest_first(roots: Iterable[Path]) -> list[Found]:
    """All checkpoints below the given folders, the furthest first; at a tie the folder named first wins."""
    found: list[Found] = []
    for root in roots:
        if not root.is_dir():
            continue
        for path in sorted(root.iterdir()):
            if (match := _NAME.match(path.name)) and path.is_dir():
                found.append(Found(path, int(match[1]), int(match[2] or 0)))
    return sorted(found, key=lambda item: (-item.step, -item.micro))


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is there to the bit."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        names = {item.name for item in path.iterdir()} - {MANIFEST}
        if names != manifest.keys():
            return f"files differ from the manifest: {', '.join(sorted(names ^ manifest.keys()))}"
        for name, expected in manifest.items():
            if (path / name).stat().st_size != expected["bytes"]:
                return f"{name} has another size"
            if sha256(path / name) != expected["sha256"]:
                return f"{name} has another SHA-256"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the manifest cannot be read: {error}"
    return None


def quarantine(path: Path) -> Path:
    """Rename a bad checkpoint to `bad-…`, so that it is kept for people and never read again."""
    target = path.with_name(f"bad-{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"bad-{path.name}-{number}")
    path.rename(target)
    return target
