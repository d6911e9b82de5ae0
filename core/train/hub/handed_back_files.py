"""The weights of earlier jobs that a job starts from: where they lie, and that they are what was pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.errors import ModelError
from core.spec.run.chain import HandedBack
from core.spec.run.folder import ARTIFACTS


def checked_folder(runs: Path, handed: HandedBack, digest: Callable[[Path], str]) -> Path:
    """Folder of the weights, every file of which has the pinned SHA-256. ModelError otherwise. `digest` returns the
    SHA-256 of a file."""
    artifacts = runs / handed.job / f"attempt-{handed.attempt}" / ARTIFACTS
    for file in handed.files:
        path = artifacts / file.path
        if not path.is_file():
            raise ModelError(
                f"{file.path} of {handed.job} is no longer on the data root: restore it from a backup, or train that "
                "job again",
                field="model.id",
                code="model_job_gone",
            )
        if path.stat().st_size != file.bytes or digest(path) != file.sha256:
            raise ModelError(
                f"{file.path} of {handed.job} has changed since that job handed it back: restore it from a backup, or "
                "train that job again",
                field="model.id",
                code="model_job_changed",
            )
    return artifacts / handed.folder
