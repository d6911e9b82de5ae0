"""How long the rows of a job are, as far as anybody here has counted: previews have, else max_length bounds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from core.db.tables import PREVIEWS, File, Job
from core.jobs.base.states import Status
from core.spec.axes.data import FileSource, Generated
from core.spec.job import JobSpec
from core.spec.session.job import is_session

NEWEST = 20
"""Previews of a file that are looked at."""
LEAST = 64
"""Tokens of an example of a session, which brings no rows, that its slot has to take at least."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """What is known of a job's rows before it runs."""

    longest: int
    """Tokens; no row of a batch has more."""
    source: Literal["preview", "max_length"]
    epoch_tokens: int | None = None
    """Tokens of all training rows, each counted once."""
    epoch_rows: int | None = None
    """Training rows that are used."""
    file_rows: int | None = None
    """Rows of the training file, problems of its task or games; None: it is none of them."""

    @property
    def training(self) -> int | None:
        """Training rows, as far as they are known: at most so many."""
        return self.file_rows if self.epoch_rows is None else self.epoch_rows


def rows(session: Session, project_id: str, spec: JobSpec) -> RowLengths:
    """A preview counts if its file, model, rendering and truncation are the job's."""
    limit = spec.training.max_length
    train = spec.data.train
    if isinstance(train, Generated):
        return RowLengths(limit, "max_length", file_rows=train.size)
    if is_session(spec):
        return RowLengths(min(LEAST, limit), "max_length")
    if not isinstance(train, FileSource):
        return RowLengths(limit, "max_length")
    uploaded = session.execute(
        select(File.rows).where(File.project_id == project_id, File.id == train.id)
    ).scalar_one_or_none()
    found = session.execute(
        select(Job.spec, Job.result)
        .where(
            Job.project_id == project_id,
            text(PREVIEWS),
            Job.status == Status.SUCCEEDED.value,
            Job.spec["data"]["train"]["id"].as_string() == train.id,
        )
        .order_by(Job.id.desc())
        .limit(NEWEST)
    )
    wanted = _counted_by(spec.model_dump(mode="json"))
    for previewed, result in found:
        if _counted_by(previewed) != wanted or not (result or {}).get("ok"):
            continue
        epoch = result.get("epoch") or {}
        # Rows held out of another file may be longer than any of these.
        here = spec.data.eval is None
        longest = min(limit, max(1, int(result["tokens"]["longest"]))) if here else limit
        rows_used = int(result["rows"]["used"])
        whole = spec.data.split is None  # the tokens of a part are not counted
        return RowLengths(
            longest,
            "preview" if here else "max_length",
            int(epoch["tokens"]) if whole and "tokens" in epoch else None,
            rows_used if whole else None,
            uploaded,
        )
    return RowLengths(limit, "max_length", file_rows=uploaded)


def _counted_by(spec: dict[str, Any]) -> tuple[Any, ...]:
    """What the tokens of a row depend on."""
    training = spec["training"]
    return (
        spec["model"],
        spec["data"]["train"],
        spec["data"].get("rendering"),
        training["max_length"],
        training["truncation"],
    )
