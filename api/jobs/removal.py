"""Deleting a job with all that it has written; and what that would free, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import Job, RegisteredModel
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import deletion, retention
from core.jobs.lifecycle.deletion import Freed, Obstacle
from core.jobs.lifecycle.registry import exports
from core.removal import removing
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.store import Store


@dataclass(frozen=True, slots=True)
class Deletion:
    """What goes, or would go, with a job."""

    job_id: str
    name: str | None
    model: str | None
    """Its entry in the registry."""
    exports: tuple[str, ...]
    """Folders of exported formats."""
    freed: Freed
    runs: tuple[str, ...]
    """Folders below `runs`."""
    obstacles: tuple[Obstacle, ...]


class Deletions:
    """Deleting jobs of one installation."""

    def __init__(self, database: Database, settings: Settings, layout: Layout, store: Store) -> None:
        self._database = database
        self._settings = settings
        self._layout = layout
        self._store = store

    def preview(self, actor: Actor, job_id: str) -> Deletion:
        """What `delete` would do now; nothing where the job was deleted before. Raises NotFound."""
        with self._database.read() as session:
            return self._of(session, deletion.look_up(session, actor, job_id), job_id)

    def delete(self, actor: Actor, job_id: str) -> Deletion:
        """Delete an ended job. Raises NotFound, Conflict."""
        with self._database.read() as session:
            goes = self._of(session, deletion.require(session, actor, job_id), job_id)
        half_life = self._settings.fairshare_half_life_hours * 3600.0
        with removing(retention.ASIDE) as set_aside, self._database.write() as session:
            if not deletion.remove(session, actor, job_id, goes.freed, half_life):
                goes = Deletion(job_id, None, None, (), Freed(), (job_id,), ())
            for run in () if self._settings.is_remote else goes.runs:
                set_aside(self._layout.job(run))
        for run in goes.runs if self._settings.is_remote else ():
            self._store.discard(f"runs/{run}")
        return goes

    def _of(self, session: Session, job: Job | None, job_id: str) -> Deletion:
        name: str | None = None
        model: str | None = None
        runs, formats = [job_id], list[str]()
        obstacles = list[Obstacle]()
        if job is not None:
            name = job.name
            runs += [export.id for export in exports.of_job(session, job)]
            entry = select(RegisteredModel.id).where(RegisteredModel.job_id == job_id)
            model = session.execute(entry).scalar_one_or_none()
            formats += [outcome["folder"] for outcome in exports.outcomes(session, job)]
            obstacles += deletion.obstacles(session, job)
        freed = Freed.of(entry for run in runs for entry in self._store.tree(f"runs/{run}"))
        return Deletion(job_id, name, model, tuple(formats), freed, tuple(runs), tuple(obstacles))
