"""Checkpoints between the tiers of a box: its memory, where a trainer leaves snapshots, and the disk.

A snapshot is a checkpoint like any other, in a folder of a tmpfs whose path ends like that of its run folder
(`JOB/attempt-N/checkpoints/step-…`). It outlives the trainer. The worker brings it to the disk when an attempt has
ended, so that any box can go on from it, and frees the memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.base.files import sync
from core.errors import NoSpace
from core.spec.run.checkpoint_names import Progress, checkpoint_name, progress_of
from core.spec.run.folder import CHECKPOINTS, UNFINISHED
from core.spec.run.manifest import MANIFEST, listed_files

log = logging.getLogger("eft.data")

CHUNK = 4 << 20
"""Bytes that are copied at once."""


def name_for(root: Path, step: int, micro: int) -> str:
    """Folder name of the next checkpoint below `root` after `step` optimizer steps and `micro` backward passes of the
    next step. It is a later version of one that is there already, which stays until the new one is whole."""
    there = (progress_of(path.name) for path in root.iterdir()) if root.is_dir() else ()
    versions = [one.version for one in there if one is not None and (one.step, one.micro) == (step, micro)]
    return checkpoint_name(Progress(step, micro, max(versions, default=0) + 1))


def copy_checkpoint(source: Path, root: Path, name: str) -> Path:
    """Copy a whole checkpoint to `root / name`, where it appears whole or not at all, and is synced. ValueError when a
    file is not what the manifest says; OSError when the disk refuses."""
    manifest = (source / MANIFEST).read_bytes()
    files = listed_files(manifest)
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f"{UNFINISHED}{name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        for file in files:
            if _copy(source / file.path, aside / file.path) != file.sha256:
                raise ValueError(f"{source.name}/{file.path} is not what its manifest says")
        (aside / MANIFEST).write_bytes(manifest)
        sync(aside / MANIFEST)
        sync(aside)
        final = root / name
        aside.rename(final)
        sync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _copy(source: Path, target: Path) -> str:
    """SHA-256 of what was copied and synced."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb", buffering=0) as writer:
        while chunk := reader.read(CHUNK):
            digest.update(chunk)
            left = memoryview(chunk)
            while left:
                left = left[writer.write(left) :]
        os.fsync(writer.fileno())
    return digest.hexdigest()


class Snapshots:
    """The snapshots of one data root in the memory of this box. Every path is made here."""

    def __init__(self, memory: Path, data_root: Path) -> None:
        """`memory`: a folder in memory, which may be shared with other users and other data roots."""
        key = hashlib.sha256(os.fsencode(data_root.absolute())).hexdigest()[:16]
        self._root = memory / f"eft-{os.geteuid()}-{key}"

    def open(self) -> str | None:
        """Make the folder, for this user alone. Why it cannot be used; None: it can."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            seen = self._root.lstat()
        except OSError as error:
            return f"{self._root} cannot be made: {error.strerror}"
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            return f"{self._root} is there already, and is not a folder of this user alone"
        return None

    def close(self) -> None:
        """Remove the folder, unless it holds snapshots that a later worker of this box is to bring to the disk."""
        with suppress(OSError):
            self._root.rmdir()

    def attempt(self, job_id: str, attempt: int) -> Path:
        """Folder of an attempt."""
        return self._root / job_id / f"attempt-{attempt}"

    def left(self, job_id: str) -> list[Path]:
        """Folders of attempts of a job that hold snapshots."""
        return sorted({path.parent.parent for path in (self._root / job_id).glob(f"attempt-*/{CHECKPOINTS}/step-*")})

    def jobs(self) -> list[str]:
        """Ids of the jobs with a folder here."""
        return sorted(path.name for path in self._root.iterdir()) if self._root.is_dir() else []

    def bring_down(self, job_id: str, folder: Path) -> str | None:
        """Copy a job's furthest snapshot that is whole into the run folder of an attempt whose processes are gone,
        unless an attempt has a checkpoint on the disk that is as far, and free the memory. The name of the new
        checkpoint. Where the disk has no room the snapshots stay, and the next attempt on this box goes on from them.
        """
        there = [folder.parent / name / CHECKPOINTS for name in _names(folder.parent)]
        reached = max((found[0][:2] for found in _checkpoints(there)), default=(-1, -1))
        brought = None
        for progress, snapshot in _checkpoints([one / CHECKPOINTS for one in self.left(job_id)]):
            if progress[:2] <= reached:
                break
            try:
                needs = sum(file.bytes for file in listed_files((snapshot / MANIFEST).read_bytes()))
                if shutil.disk_usage(folder).free < needs:
                    raise NoSpace(f"{needs >> 20} MiB do not fit", needs_bytes=needs)
                root = folder / CHECKPOINTS
                brought = copy_checkpoint(snapshot, root, name_for(root, progress.step, progress.micro)).name
                log.info("%s: its snapshot after step %d is on the disk as %s", job_id, progress.step, brought)
                break
            except (NoSpace, OSError) as error:
                log.warning("%s: the snapshot %s stays in memory: %s", job_id, snapshot, error)
                return None
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s: the snapshot %s is damaged and not used: %s", job_id, snapshot.name, error)
        self.forget(job_id)
        return brought

    def forget(self, job_id: str, attempt: int | None = None) -> None:
        """Free the memory of a job's snapshots, or of those of one attempt."""
        gone = self._root / job_id if attempt is None else self.attempt(job_id, attempt)
        shutil.rmtree(gone, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("attempt-*")]


def _checkpoints(roots: Iterable[Path]) -> list[tuple[Progress, Path]]:
    """Complete checkpoints below these folders, the furthest first."""
    found = [
        (progress, path)
        for root in roots
        for path in (root.iterdir() if root.is_dir() else ())
        if (progress := progress_of(path.name)) is not None and (path / MANIFEST).is_file()
    ]
    return sorted(found, reverse=True)
