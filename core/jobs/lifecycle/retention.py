"""What is kept for how long, and what goes: by rule, and never what a job in progress may need.

- Checkpoints, and artifacts that no job lists, of jobs that ended long ago. What a job hands back stays, as do its log
  and its events; a later retry begins from the start.
- Previews and trials of rewards that ended long ago, with their rows.
- Uploaded files that no job has ever named, where the administrator says so.
- Curves, logs and all events but changes of state of jobs that ended long ago, where the administrator says so.

Everything is checked again under the job's lock and renamed before it goes, so that no reader finds half of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import ColumnElement, Select, Text, cast, delete, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from core.db.engine import Database, read_now
from core.db.tables import Artifact, Event, File, Job, Metric, PipelineStep
from core.jobs.base.states import FINAL
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import deletion
from core.jobs.policies import audit
from core.removal import delete_tree, set_aside
from core.settings import Settings
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS, EVENTS_FILE, LOG_FILE
from core.storage.layout import Layout

DAY = 86_400.0
ASIDE = ".gone-"
_FILE_ID = re.compile(r"file-[0-9a-z]{26}")
_CHATTER = Event.type.not_in(("status", "result", "error"))
"""Events beside those that say what became of a job."""
_ENDED = [status.value for status in FINAL]


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Days after which things go; 0: never."""

    checkpoints_days: float = 30.0
    previews_days: float = 30.0
    unused_files_days: float = 0.0
    history_days: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> RetentionRules:
        return cls(
            settings.keep_checkpoints_days,
            settings.keep_previews_days,
            settings.keep_unused_files_days,
            settings.keep_history_days,
        )


@dataclass(frozen=True, slots=True)
class Removal:
    """What may go."""

    kind: Literal["checkpoints", "preview", "file", "history"]
    id: str
    """Id of the job, the preview or the file."""
    project_id: str
    paths: tuple[Path, ...]
    bytes: int
    why: str
    before: float
    """What ended, or was uploaded, before that."""


def find(session: Session, layout: Layout, rules: RetentionRules) -> Iterator[Removal]:
    """What may go now, by the rules. Nothing is changed."""
    now = read_now(session)
    if rules.checkpoints_days:
        words, before = (
            f"its job ended more than {rules.checkpoints_days:g} days ago",
            now - rules.checkpoints_days * DAY,
        )
        for job_id, project_id in session.execute(_ended(before, "train")).all():
            paths = _spare(session, layout, job_id, before)
            if paths:
                yield Removal("checkpoints", job_id, project_id, paths, sum(map(size, paths)), words, before)
    if rules.previews_days:
        before = now - rules.previews_days * DAY
        words = f"it ended more than {rules.previews_days:g} days ago"
        for job_id, project_id in session.execute(_ended(before, "preview", "trial")).all():
            paths = tuple(path for path in [layout.job(job_id)] if path.is_dir())
            yield Removal("preview", job_id, project_id, paths, sum(map(size, paths)), words, before)
    if rules.history_days:
        before = now - rules.history_days * DAY
        words = f"its job ended more than {rules.history_days:g} days ago"
        told = or_(exists().where(Metric.job_id == Job.id), exists().where(Event.job_id == Job.id, _CHATTER))
        for job_id, project_id in session.execute(_ended(before, "train").where(told)).all():
            paths = _written(layout, job_id)
            yield Removal("history", job_id, project_id, paths, sum(map(size, paths)), words, before)
    if rules.unused_files_days:
        before = now - rules.unused_files_days * DAY
        words = f"no job has named it in {rules.unused_files_days:g} days"
        used = _named_files(session)
        old = select(File).where(File.created_at < before).order_by(File.id)
        for row in session.execute(old).scalars():
            if row.id not in used:
                yield Removal("file", row.id, row.project_id, (layout.file(row.id),), row.bytes, words, before)


def remove(database: Database, layout: Layout, actor: Actor | None, removal: Removal) -> bool:
    """Let it go, if it still may. False: somebody needs it now, or it has gone already."""
    with database.write() as session:
        aside = _set_aside(session, layout, removal)
        if aside is None:
            return False
        told = {"kind": removal.kind, "bytes": removal.bytes, "why": removal.why}
        audit.record(session, actor, "gc.remove", removal.id, told, project_id=removal.project_id)
    for path in aside:
        delete_tree(path)
    return True


def _set_aside(session: Session, layout: Layout, removal: Removal) -> list[Path] | None:
    """Renamed under the lock of the row that they hang on; None: it may not go."""
    match removal.kind:
        case "file":
            row = session.execute(select(File).where(File.id == removal.id).with_for_update()).scalar_one_or_none()
            if row is None or deletion.jobs_using_file(session, row.project_id, row.id, 1) or _named(session, row):
                return None
            session.execute(delete(File).where(File.id == row.id))
            return [layout.file(row.id)]  # the row first, as when somebody deletes it; the bytes once that is written
        case "checkpoints" | "preview" | "history":
            query = select(Job).where(Job.id == removal.id, Job.status.in_(_ENDED)).with_for_update()
            job = session.execute(query).scalar_one_or_none()
            if job is None:
                return None
            if removal.kind == "preview":
                deletion.rows(session, job)
            elif removal.kind == "history":
                session.execute(delete(Metric).where(Metric.job_id == removal.id))
                session.execute(delete(Event).where(Event.job_id == removal.id, _CHATTER))
            elif session.execute(select(resumed(removal.id, removal.before))).scalar_one():
                return None
            return [set_aside(path, ASIDE) for path in removal.paths if path.exists()]


def _ended(before: float, *kinds: str) -> Select[str, str]:
    query = select(Job.id, Job.project_id).where(Job.kind.in_(kinds), Job.status.in_(_ENDED), Job.finished_at < before)
    return query.order_by(Job.finished_at, Job.id)


def resumed(job_id: str, before: float) -> ColumnElement[bool]:
    """Whether a job goes on from this one's checkpoints that is not over, or not for so long: it may be tried again."""
    later = aliased(Job)
    alive = or_(later.status.not_in(_ENDED), later.finished_at >= before)
    return exists().where(alive, cast(later.resume_from, Text).contains(job_id))


def _spare(session: Session, layout: Layout, job_id: str, before: float) -> tuple[Path, ...]:
    """Folders of an ended job that are no longer needed."""
    attempts = [path for path in layout.job(job_id).glob("attempt-*") if path.is_dir()]
    if not attempts or session.execute(select(resumed(job_id, before))).scalar_one():
        return ()
    handed_back = session.execute(select(func.max(Artifact.attempt)).where(Artifact.job_id == job_id)).scalar_one()
    found = [path / CHECKPOINTS for path in attempts]
    found += [path / ARTIFACTS for path in attempts if path.name != f"attempt-{handed_back}"]
    return tuple(sorted(path for path in found if path.is_dir()))


def _written(layout: Layout, job_id: str) -> tuple[Path, ...]:
    """What its trainers wrote of how it went."""
    found = [path / name for path in layout.job(job_id).glob("attempt-*") for name in (LOG_FILE, EVENTS_FILE)]
    return tuple(sorted(path for path in [*found, layout.curves(job_id)] if path.is_file()))


def _named_files(session: Session) -> set[str]:
    """Every file that any job's data names, whatever became of the job."""
    used: set[str] = set()
    for (document,) in session.execute(select(cast(Job.spec["data"], Text))):
        used.update(_FILE_ID.findall(document or ""))
    for (document,) in session.execute(select(cast(PipelineStep.spec["data"], Text))):
        used.update(_FILE_ID.findall(document or ""))
    return used


def _named(session: Session, row: File) -> bool:
    query = select(Job.id).where(Job.project_id == row.project_id, cast(Job.spec["data"], Text).contains(row.id))
    steps = select(PipelineStep.name).where(
        PipelineStep.project_id == row.project_id, cast(PipelineStep.spec["data"], Text).contains(row.id)
    )
    return any(session.execute(one.limit(1)).first() is not None for one in (query, steps))


def sweep(layout: Layout) -> int:
    """Delete what a process that was killed has set aside and not deleted. Returns how much there was."""
    depths = ("", "*/*/", f"*/*/{ARTIFACTS}/")
    left = [path for depth in depths for path in layout.runs.glob(f"{depth}{ASIDE}*")]
    for path in left:
        delete_tree(path)
    return len(left)


def size(path: Path) -> int:
    """Bytes on the disk of a file, or of all below a folder."""
    return sum(one.lstat().st_blocks * 512 for one in _below(path))


def _below(path: Path) -> Iterable[Path]:
    if path.is_dir() and not path.is_symlink():
        return [one for one in path.rglob("*") if not one.is_dir() or one.is_symlink()]
    return [path] if path.exists() else []
