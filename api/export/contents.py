"""What a project owns, part after part: docs/operations.md has the layout. Never anybody else's, and never a secret.

Each part is as of the moment when it is read: of a job that runs meanwhile, its log may tell more than its row.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, Table, or_, select
from sqlalchemy.orm import Session

from api.export.archive import Archive
from core import __version__
from core.base.addresses import parse
from core.db.engine import Database, read_now
from core.db.tables import Base, Job, Project, User
from core.logfile import first_byte
from core.spec.run.folder import CHECKPOINTS, LOG_FILE, UNFINISHED
from core.storage.layout import Layout
from core.storage.store import Folder, ObjectChanged, Store

PAGE = 200
"""Jobs looked at in one transaction."""
ROWS = 500
TABLES = (
    "files",
    "jobs",
    "job_dependencies",
    "attempts",
    "artifacts",
    "models",
    "allocations",
    "slot_guests",
    "sweeps",
    "sessions",
    "session_operations",
    "session_saves",
    "servings",
    "pipelines",
    "pipeline_steps",
    "pipeline_events",
    "memberships",
    "api_keys",
    "webhooks",
    "webhook_deliveries",
    "usage",
    "usage_days",
    "audit",
)
"""Tables whose rows of the project are exported, a file each. Stored idempotent answers are no records and stay out."""
HIDDEN = {"api_keys": {"sha256", "prefix"}, "webhooks": {"secrets", "url"}}
"""Columns that are secrets, or as good as one: a chat's URL gives the right to write there."""
README = """\
Everything that the project `{name}` of this eft owns, as of {when} (times are seconds since 1970, UTC).

project.json           what this is, who it names
<table>.jsonl          its rows: {tables}; one JSON object a line, without keys' hashes and webhooks' secrets and URLs;
                       bytes in base64
limits.json            its quotas
files/<id>             uploads, byte for byte; files.jsonl has their names
jobs/<id>/events.jsonl, metrics.jsonl     what happened, and all curves
jobs/<id>/attempt-<n>/ what its trainers left: log.txt, events.jsonl, run.json, artifacts/ with models{checkpoints}
MANIFEST.jsonl         last: SHA-256 and size of each file here; what was missing; `complete` in its last line

An archive without the last line of MANIFEST.jsonl broke off.
"""


@dataclass(frozen=True, slots=True)
class Exporter:
    database: Database
    layout: Layout
    store: Store
    project_id: str
    checkpoints: bool

    def stream(self) -> Iterator[bytes]:
        """The archive. Raises OSError or StoreAway where it cannot go on; then its end is missing."""
        with self.database.read() as session:
            project = session.get_one(Project, self.project_id)
            now = read_now(session)
        archive = Archive(f"eft-{project.id}", self.layout.uploads, now)
        try:
            yield from self._parts(archive, project, now)
            yield from archive.end()
        finally:
            archive.close()

    def _parts(self, archive: Archive, project: Project, now: float) -> Iterator[bytes]:
        kept = " and checkpoints/" if self.checkpoints else "; no checkpoints"
        words = README.format(name=project.name, when=f"{now:.0f}", tables=", ".join(TABLES), checkpoints=kept)
        yield from archive.text("README.txt", words)
        yield from archive.document("project.json", self._about(project, now))
        for name in TABLES:
            yield from archive.rows(f"{name}.jsonl", self._rows(self._owned(Base.metadata.tables[name])))
        yield from archive.document("limits.json", self._limits())
        for file_id, size in self._files():
            yield from self._object(archive, f"files/{file_id}", f"files/{file_id}", size)
        for job_id in self._jobs():
            yield from self._job(archive, job_id)

    def _job(self, archive: Archive, job_id: str) -> Iterator[bytes]:
        for name, order in (("events", ("seq",)), ("metrics", ("name", "step", "attempt"))):
            table = Base.metadata.tables[name]
            query = select(table).where(table.c.job_id == job_id, table.c.project_id == self.project_id)
            rows = self._rows(query.order_by(*(table.c[column] for column in order)))
            yield from archive.rows(f"jobs/{job_id}/{name}.jsonl", rows)
        for entry in sorted(self.store.tree(f"runs/{job_id}"), key=lambda entry: entry.key):
            inside = entry.key.removeprefix(f"runs/{job_id}/")
            parts = inside.split("/")
            if any(part.startswith((UNFINISHED, ".")) for part in parts):
                continue  # being written, or being removed
            if self.checkpoints or CHECKPOINTS not in parts[1:2]:
                yield from self._object(archive, f"jobs/{job_id}/{inside}", entry.key, entry.bytes, grows=True)

    def _object(self, archive: Archive, name: str, key: str, size: int, *, grows: bool = False) -> Iterator[bytes]:
        """Whatever it is that cannot be opened, all the rest can be exported: a job may leave links and pipes."""
        try:
            start = self._first(key) if grows else 0
            source = self.store.open(key, size=None if grows else size, start=start, length=size - start)
        except FileNotFoundError:
            archive.missing(name, "gone")
        except ObjectChanged:
            archive.missing(name, "not what was stored")
        except OSError as error:
            archive.missing(name, f"cannot be read: {error.strerror}")
        else:
            yield from archive.object(name, source, size - start)

    def _first(self, key: str) -> int:
        """Offset at which a log begins: the oldest part of a long one is not kept (core/logfile.py)."""
        match self.store:
            case Folder() if key.endswith(f"/{LOG_FILE}"):
                descriptor = os.open(self.store.root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    return first_byte(descriptor, os.fstat(descriptor).st_size)
                finally:
                    os.close(descriptor)
            case _:
                return 0

    # -- rows

    def _owned(self, table: Table) -> Select[Any]:
        columns = [column for column in table.columns if column.name not in HIDDEN.get(table.name, ())]
        hidden = [table.c.url] if table.name == "webhooks" else []
        return select(*columns, *hidden).where(table.c.project_id == self.project_id).order_by(*table.primary_key)

    @contextmanager
    def _rows(self, query: Select[Any]) -> Iterator[Iterable[dict[str, Any]]]:
        with self.database.read() as session:
            found = session.execute(query.execution_options(yield_per=ROWS)).mappings()
            yield (_shown(dict(row)) for row in found)

    def _about(self, project: Project, now: float) -> dict[str, Any]:
        with self.database.read() as session:
            users = [{"id": user.id, "name": user.name} for user in self._users(session)]
        about = {"id": project.id, "name": project.name, "created_at": project.created_at}
        return {"format": 1, "eft": __version__, "taken_at": now, "project": about, "users": users}

    def _users(self, session: Session) -> list[User]:
        """Whoever the rows name: their ids would say nothing elsewhere."""
        named = []
        for table in ("jobs", "files", "pipelines", "api_keys", "usage", "webhooks"):
            found = Base.metadata.tables[table]
            named.append(User.id.in_(select(found.c.owner_id).where(found.c.project_id == self.project_id)))
        members, audit = Base.metadata.tables["memberships"], Base.metadata.tables["audit"]
        named.append(User.id.in_(select(members.c.user_id).where(members.c.project_id == self.project_id)))
        named.append(User.id.in_(select(audit.c.actor_id).where(audit.c.project_id == self.project_id)))
        return list(session.execute(select(User).where(or_(*named)).order_by(User.name)).scalars())

    def _limits(self) -> dict[str, Any] | None:
        table = Base.metadata.tables["limits"]
        query = select(table).where(table.c.scope == "project", table.c.subject_id == self.project_id)
        with self.database.read() as session:
            row = session.execute(query).mappings().one_or_none()
        return None if row is None else dict(row)

    def _jobs(self) -> Iterator[str]:
        after = ""
        while True:
            query = select(Job.id).where(Job.project_id == self.project_id, Job.id > after).order_by(Job.id)
            with self.database.read() as session:
                page = session.execute(query.limit(PAGE)).scalars().all()
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]

    def _files(self) -> Iterator[tuple[str, int]]:
        table, after = Base.metadata.tables["files"], ""
        while True:
            query = select(table.c.id, table.c.bytes).where(table.c.project_id == self.project_id, table.c.id > after)
            with self.database.read() as session:
                page = session.execute(query.order_by(table.c.id).limit(PAGE)).all()
            yield from ((row[0], row[1]) for row in page)
            if len(page) < PAGE:
                return
            after = page[-1][0]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is exported: of a webhook's URL only the part that is no secret; bytes in base64."""
    if "url" in row:
        row["origin"] = parse(row.pop("url")).origin
    return {name: b64encode(value).decode() if isinstance(value, bytes) else value for name, value in row.items()}
