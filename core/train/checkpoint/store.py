"""Folders of checkpoints that are complete or not there.

A checkpoint is written to a folder aside, every file is synced, `manifest.json` gets size and SHA-256 of each, the
folder is renamed, its parent is synced. A crash at any point leaves at most a folder whose name starts with `tmp-`,
which is never read. Names state the progress (core/spec/run/checkpoint_names.py). Beside the checkpoints,
`best-00000040` holds the weights of the evaluation that was the best.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from core import removal
from core.base.files import sha256, sync
from core.spec.run.checkpoint_names import Progress, best_step, progress_of, superseded
from core.spec.run.folder import UNFINISHED
from core.spec.run.manifest import MANIFEST
from core.train.checkpoint.keep import Written, kept


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    path: Path
    step: int
    micro: int


def write(root: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Make checkpoint `name` below `root` from what `fill` writes into a folder. OSError when the disk refuses, and
    Unreadable when what was written cannot be opened again: then nothing complete has appeared and the older
    checkpoints are untouched. FileExistsError when there is one of that name: a checkpoint is never replaced."""
    return complete(begin(root, name, fill), name)


def begin(root: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """The first part of `write`: the folder aside, with what `fill` wrote into it."""
    root.mkdir(parents=True, exist_ok=True)
    if (root / name).exists():
        raise FileExistsError(f"there is a checkpoint {name} in {root} already")
    aside = root / f"{UNFINISHED}{name}-{os.getpid()}"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    try:
        fill(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def complete(aside: Path, name: str, *, lasting: bool = True) -> Path:
    """The second part of `write`, which needs no tensor: it may run beside the next steps. `lasting`: on a disk, and
    not in memory, which a power cut empties anyway."""
    root = aside.parent
    try:
        files = sorted(path for path in aside.iterdir())
        for path in files:
            _open_again(path)
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        (aside / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), encoding="utf-8")
        for path in [*files, aside / MANIFEST, aside] if lasting else []:
            sync(path)
        final = root / name
        aside.rename(final)
        if lasting:
            sync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


class Unreadable(OSError):
    """A file of a checkpoint is not what was written into it."""


def _open_again(path: Path) -> None:
    """Raises Unreadable for a file of tensors that is torn, and for JSON that is none."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:  # its header is held against the length of the file
                tensors.keys()
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
    except (SafetensorError, ValueError) as error:
        raise Unreadable(f"{path.name} was written and cannot be read again: {error}") from error


def prune(root: Path, keep_last: int, best_steps: Iterable[int] = (), best: int = 0, hourly: int = 0) -> None:
    """Remove the checkpoints of a folder that `keep.kept` does not name, older versions of the others, and folders left
    aside by a crash."""
    for name in superseded(path.name for path in root.iterdir()):
        discard(root / name)
    found = newest_first([root])
    written = [Written(one.path.name, one.step, one.path.stat().st_mtime if hourly else 0.0) for one in found]
    stay = kept(written, keep_last, best_steps, best, hourly)
    for old in found:
        if old.path.name not in stay:
            discard(old.path)
    for left in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)


def prune_best(root: Path, keep: Collection[int]) -> None:
    """Remove the weights of evaluations that can no longer become the best: all but those of the steps `keep`."""
    for path in sorted(root.iterdir()):
        if (step := best_step(path.name)) is not None and step not in keep:
            discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint."""
    removal.remove(path, UNFINISHED)


def newest_first(roots: Iterable[Path]) -> list[FoundCheckpoint]:
    """All checkpoints below the given folders, the furthest first; at a tie the folder named first wins, and in one
    folder the later version."""
    found: list[tuple[Progress, Path]] = []
    for root in roots:
        there = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        named = [(progress, path) for path in there if (progress := progress_of(path.name)) is not None]
        found += sorted(named, reverse=True)
    found.sort(key=lambda item: item[0][:2], reverse=True)  # stable: folders stay in order
    return [FoundCheckpoint(path, progress.step, progress.micro) for progress, path in found]


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
