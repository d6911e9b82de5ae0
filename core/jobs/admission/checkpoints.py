"""The checkpoints of a job as the data root has them: what there is, which one a person means, whether it is whole."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from core.errors import NotFound
from core.spec.run.checkpoint_names import Progress, progress_of
from core.spec.run.folder import CHECKPOINTS
from core.spec.run.manifest import MANIFEST, listed_files
from core.storage.store import ObjectChanged, Store, StoredObject

LAST = "last"
BAD = "bad-"
"""Prefix of a checkpoint that was found damaged and set aside."""
PIECE = 1 << 20
_ATTEMPT = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder of an attempt that holds a complete state."""

    id: str
    """Name of the folder and number of the attempt: `step-00000050@2`."""
    key: str
    """Key of the folder on the data root."""
    attempt: int
    progress: Progress
    bytes: int
    written_at: float
    """When its manifest was written, in seconds since 1970."""
    bad: bool
    """It was damaged when a trainer tried it, and was set aside."""


def of_job(store: Store, job_id: str) -> list[StoredCheckpoint]:
    """All that are complete, and those that were set aside, the furthest first."""
    objects: dict[tuple[int, str], list[StoredObject]] = {}
    for entry in store.tree(f"runs/{job_id}"):
        parts = PurePosixPath(entry.key).parts
        if len(parts) == 6 and parts[3] == CHECKPOINTS and (attempt := _ATTEMPT.fullmatch(parts[2])) is not None:
            objects.setdefault((int(attempt[1]), parts[4]), []).append(entry)
    found = []
    for (number, name), entries in objects.items():
        manifest = next((entry for entry in entries if entry.key.endswith(f"/{MANIFEST}")), None)
        progress = progress_of(name.removeprefix(BAD))
        if manifest is None or progress is None:
            continue
        found.append(
            StoredCheckpoint(
                f"{name}@{number}",
                manifest.key.removesuffix(f"/{MANIFEST}"),
                number,
                progress,
                sum(entry.bytes for entry in entries),
                manifest.modified,
                name.startswith(BAD),
            )
        )
    return sorted(found, key=lambda one: (one.progress, one.attempt, not one.bad), reverse=True)


def choose(
    found: Iterable[StoredCheckpoint], handle: str, job_id: str, field: str, *, damaged: bool = False
) -> StoredCheckpoint:
    """The checkpoint that `handle` means: an id, a name, a number of steps, or `last`, the furthest; of several
    attempts the newest. `damaged`: an id may mean one that was set aside. Raises NotFound."""
    found = list(found)
    if damaged and (aside := next((one for one in found if one.bad and one.id == handle), None)) is not None:
        return aside
    whole = [one for one in found if not one.bad]
    if handle == LAST:
        matching = whole
    elif handle.isdecimal():
        matching = [one for one in whole if one.progress.step == int(handle) and not one.progress.micro]
    else:
        matching = [one for one in whole if handle in (one.id, one.id.partition("@")[0])]
    if not matching:
        have = ", ".join(one.id for one in whole[:5]) + (", …" if len(whole) > 5 else "")
        words = f"it has {have}" if whole else "it has none"
        raise NotFound(f"`{job_id}` has no checkpoint `{handle[:60]}`; {words}", field=field)
    return matching[0]


def sha256_of_manifest(store: Store, found: StoredCheckpoint) -> str:
    """What a job is pinned to that begins with the checkpoint. Raises FileNotFoundError."""
    return hashlib.sha256(store.read(f"{found.key}/{MANIFEST}")).hexdigest()


def fault(store: Store, found: StoredCheckpoint, halted: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with a checkpoint, in words; None when every file is there to the bit. `halted` is called between
    pieces and may raise. Raises StoreAway."""
    try:
        listed = listed_files(store.read(f"{found.key}/{MANIFEST}"))
    except FileNotFoundError:
        return "it is gone"
    except (ValueError, KeyError, TypeError) as error:
        return f"the manifest cannot be read: {error}"
    there = {PurePosixPath(entry.key).name for entry in store.tree(found.key)} - {MANIFEST}
    if strange := there ^ {file.path for file in listed}:
        return f"files differ from the manifest: {', '.join(sorted(strange))}"
    for file in listed:
        digest, read = hashlib.sha256(), 0
        try:
            reader = store.open(f"{found.key}/{file.path}", size=file.bytes, start=0, length=file.bytes)
        except FileNotFoundError:
            return f"{file.path} is gone"
        except ObjectChanged:
            return f"{file.path} has another size"
        try:
            while piece := reader.read(PIECE):
                halted()
                digest.update(piece)
                read += len(piece)
        finally:
            reader.close()
        if read != file.bytes:
            return f"{file.path} has another size"
        if digest.hexdigest() != file.sha256:
            return f"{file.path} has another SHA-256"
    return None
