"""Where things lie below the data root. Every path is made here; no user's text is ever part of one."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from core import private
from core.errors import EftError, NoSpace
from core.spec.run.folder import ARTIFACTS, SAVED
from core.spec.run.model_cache import MODELS

RESTORING = "restoring.json"
"""In a data root into which a backup is being put (box/backup/restore.py)."""
_SAFE_ID = re.compile(r"[a-z]{2,8}-[0-9a-z]{26}")


class HalfRestored(EftError):
    """Nothing may use this data root yet."""

    code = "half_restored"


@dataclass(frozen=True, slots=True)
class Layout:
    """The data root, shared by API and workers."""

    root: Path

    @property
    def files(self) -> Path:
        return self.root / "files"

    @property
    def uploads(self) -> Path:
        """Uploads under way; on the same file system as `files`, so that the last step is a rename."""
        return self.root / "uploads"

    @property
    def models(self) -> Path:
        return self.root / MODELS

    @property
    def cache(self) -> Path:
        """What can be made again: packed weights, tokenised rows. Keyed by content; deleting an entry costs time."""
        return self.root / "cache"

    @property
    def tracking(self) -> Path:
        """What trackers of jobs write, a folder each."""
        return self.root / "tracking"

    @property
    def bells(self) -> Path:
        """Sockets by which processes of one box wake each other (core/base/bells.py)."""
        return self.root / "bells"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def file(self, file_id: str) -> Path:
        return self.files / _checked(file_id)

    def job(self, job_id: str) -> Path:
        return self.runs / _checked(job_id)

    def curves(self, job_id: str) -> Path:
        """The job's long curves, thinned out (core/jobs/views/levels.py). Can be made again."""
        return self.job(job_id) / "curves.npz"

    def session(self, session_id: str) -> Path:
        """What all attempts of a session share: the tensors of its log, its snapshots, what it saves."""
        return self.job(session_id) / "session"

    def saved(self, session_id: str, name: str) -> Path:
        """What a session has saved under a name."""
        return self.session(session_id) / SAVED / name

    def attempt(self, job_id: str, attempt: int) -> Path:
        return self.job(job_id) / f"attempt-{attempt}"

    def artifacts(self, job_id: str, attempt: int) -> Path:
        return self.attempt(job_id, attempt) / ARTIFACTS

    def create(self) -> None:
        """Make the folders; only this user may look inside. Raises HalfRestored, OpenDataRoot."""
        if (self.root / RESTORING).exists():
            raise HalfRestored(
                f"a restore into {self.root} is running or did not finish: finish it with the same `eft restore`"
            )
        private.close(self.root)
        for folder in (self.root, self.files, self.uploads, self.models, self.cache, self.runs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def require_space(self, min_free_bytes: int, needed: int = 0) -> None:
        """Raises NoSpace while the data root has less than the reserve (and what is needed on top)."""
        free = shutil.disk_usage(self.root).free
        if free - needed < min_free_bytes:
            raise NoSpace(
                f"the data root has {free >> 20} MiB left and keeps {min_free_bytes >> 20} MiB in reserve: "
                "delete files or jobs (`eft files rm`, `eft delete`), or let the administrator make room "
                "(EFT_DATA, EFT_MIN_FREE_BYTES)"
            )


def _checked(name: str) -> str:
    if not _SAFE_ID.fullmatch(name):
        raise ValueError(f"not an id: {name!r}")
    return name
