"""Two projects with everything in them, and keys of every kind, behind the application itself: no server between."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from sqlalchemy import select, update

from api.app import create_app
from api.auth import people, service
from api.auth.policy import Right, Role, Scope
from core.base import forks as base_forks
from core.db.engine import db_now
from core.db.migrate import upgrade
from core.db.tables import ApiKey, Delivery, File, Job, Maintenance, User, Webhook
from core.ids import new_id
from core.jobs.base import deliveries
from core.jobs.lifecycle import previews
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.pipelines import wishes
from core.jobs.lifecycle.pipelines.wishes import PlannedStep
from core.jobs.lifecycle.registry import entries, exports
from core.jobs.lifecycle.sessions import log, records
from core.jobs.lifecycle.submit import Actor, stop, submit
from core.jobs.lifecycle.sweeps import wishes as sweeps
from core.jobs.policies import nodes
from core.settings import Settings
from core.spec.axes.export import GGUF
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.session.job import SessionSpec
from tests.support import forks, migrated

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHA = "5" * 64
"""SHA-256 of every file here, in both projects."""


def rewarded(file: str) -> dict[str, Any]:
    """A job that learns from answers to the texts of a file."""
    train = {"type": "file", "id": file, "format": "prompt", "columns": {"prompt": "text"}}
    stage = {"type": "grpo", "reward": [{"type": "regex", "pattern": "a"}]}
    return {"model": MODEL, "data": {"train": train}, "stage": stage, "training": {"max_length": 512}}


@dataclass(frozen=True)
class Caller:
    """A user with a key."""

    name: str
    role: Role | None
    scope: Scope
    box_admin: bool = False
    key: str = ""
    user_id: str = ""
    rights: tuple[Right, ...] = tuple(Right)


@dataclass(frozen=True)
class Project:
    id: str
    name: str
    owner: Actor
    job: str
    file: str
    preview: str
    trial: str
    key: str
    pipeline: str
    sweep: str

    @property
    def model(self) -> str:
        return entries.id_of(self.job)


class World:
    """`lab` is the callers' project, `rivals` is not."""

    def __init__(self, folder: Path, database_url: str = "", **settings: Any) -> None:
        self.settings = Settings(
            data=folder, database_url=database_url, min_free_bytes=0, rate_per_minute=0, rate_strangers_per_minute=0,
            model_roots=(folder.parent,), data_roots=(folder.parent,), max_sessions=0, **settings,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        if not database_url:
            migrated.lay(folder / "eft.db")
        self.app = create_app(self.settings)
        here = self.app.state.eft
        self.database, self.layout = here.database, here.layout
        upgrade(self.database)
        self._numbers = itertools.count()
        self._webhooks: dict[str, tuple[str, str]] = {}
        self._exports: dict[str, str] = {}
        self._sessions: dict[str, str] = {}
        self.secrets: list[str] = []
        """Every key that was ever made here."""
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://api", timeout=60)
        with self.database.write() as session:
            self.root = people.add_user(session, None, "root", box_admin=True).id
            nodes.register(session, "box", "worker-x", "0.1.0", [{"id": "cpu", "kind": "cpu"}], [])
        self.lab, self.rivals = self._project("lab"), self._project("rivals")
        for project in (self.lab, self.rivals):
            self.export(project)
            self.session(project, fresh=False)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        self.database.dispose()

    def ask(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = dict(more.pop("headers", {}))
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return self._runner.run(self._client.request(method, path, headers=headers, **more))

    def fresh(self, word: str) -> str:
        return f"{word}-{next(self._numbers)}"

    # -- people and keys

    def caller(
        self,
        name: str,
        role: Role | None,
        scope: Scope,
        *,
        box_admin: bool = False,
        project: str | None = None,
        rights: Iterable[Right] = tuple(Right),
        **values: Any,
    ) -> Caller:
        """`values`: columns of the key to set, such as `expires_at`."""
        where = project or self.lab.id
        with self.database.write() as session:
            user = session.execute(select(User).where(User.name == name)).scalar_one_or_none()
            user = user or people.add_user(session, None, name, box_admin=box_admin)
            if role is not None:
                people.set_member(session, None, where, user, role)
            key, row = service.create(session, user_id=user.id, project_id=where, name="k", scope=scope, rights=rights)
            if values:
                session.execute(update(ApiKey).where(ApiKey.id == row.id).values(**values))
        self.secrets.append(key)
        return Caller(name, role, scope, box_admin, key, user.id, tuple(rights))

    def key_of(self, project: Project) -> str:
        """The id of a new key that a member of the project has and nobody uses."""
        with self.database.write() as session:
            key, row = service.create(
                session, user_id=project.owner.user_id, project_id=project.id, name="spare", scope=Scope.READ
            )
        self.secrets.append(key)
        return row.id

    def maintenance(self) -> str:
        """One that is planned for long after."""
        number = self.fresh("maint")
        with self.database.write() as session:
            times = {"starts_at": 4e9, "ends_at": 4.1e9}
            session.add(Maintenance(id=number, node=None, why="", user_id=self.root, **times))
        return number

    def webhook(self, project: Project, *, fresh: bool = True) -> tuple[str, str]:
        """The ids of a webhook and of a dead letter of it."""
        if not fresh and project.id in self._webhooks:
            return self._webhooks[project.id]
        hook = new_id("hook")
        with self.database.write() as session:
            session.add(
                Webhook(
                    id=hook, owner_id=project.owner.user_id, project_id=project.id, name="ci", kind="standard",
                    url="https://9.9.9.9/", events=[], secrets=[],
                )
            )  # fmt: skip
            session.flush()
            told = deliveries.write(session, project.owner.user_id, project.id, hook, deliveries.TEST, {})
            session.execute(update(Delivery).where(Delivery.id == told).values(state="dead"))
        self._webhooks.setdefault(project.id, (hook, told))
        return hook, told

    def export(self, project: Project) -> str:
        """The id of an export of the project's model that was cancelled before it began."""
        if project.id not in self._exports:
            with self.database.write() as session:
                _, job = entries.find(session, project.owner, project.model)
                made = exports.ask(session, project.owner, job, [GGUF(quantization="F16")])
                self._exports[project.id] = stop(session, project.owner, made).id
        return self._exports[project.id]

    def session(self, project: Project, *, fresh: bool) -> str:
        """The id of a session with one operation, which waits."""
        if fresh or project.id not in self._sessions:
            asked = SessionSpec.model_validate_json(json.dumps({"model": MODEL}))
            with self.database.write() as session:
                made = records.create(session, project.owner, asked, resolve(asked.as_job()))
                self._sessions[project.id] = made.row.id
            with self.database.write() as session:
                folder = self.layout.session(made.row.id)
                operation = {"op": "zero_grad", "model": "a"}
                log.accept(session, project.owner, folder, made.row.id, 1, operation, "0" * 64, b"\xff\x00", None)
                if not fresh:  # parked: it takes no slot from the jobs that are made here
                    session.execute(update(Job).where(Job.id == made.row.id).values(status="paused"))
        return self._sessions[project.id]

    def member(self, project: Project) -> str:
        """The id of a new member."""
        with self.database.write() as session:
            user = people.add_user(session, None, self.fresh("member"))
            people.set_member(session, None, project.id, user, Role.VIEWER)
            return user.id

    def disable(self, caller: Caller) -> None:
        with self.database.write() as session:
            session.execute(update(User).where(User.id == caller.user_id).values(disabled_at=db_now()))

    # -- things

    def _project(self, name: str) -> Project:
        with self.database.write() as session:
            made = people.add_project(session, None, name)
            user = people.add_user(session, None, f"owner of {name}")
            people.set_member(session, None, made.id, user, Role.ADMIN)
        owner = Actor(user.id, made.id)
        file = self.file(owner)
        spec = self.spec(file)
        with self.database.write() as session:
            preview = previews.ask(session, owner, spec, file).id
            trial = submit(session, owner, resolve(JobSpec.model_validate(rewarded(file))), kind="trial")
            stop(session, owner, trial)  # it takes no slot from the jobs that are made here
        several = (self.pipeline(owner, file), self.sweep(owner, file))
        project = Project(made.id, name, owner, self.job(owner, file), file, preview, trial.id, "", *several)
        return Project(**{**vars(project), "key": self.key_of(project)})

    def file(self, owner: Actor) -> str:
        file_id = new_id("file")
        self.layout.file(file_id).write_bytes(b"mine\n")
        with self.database.write() as session:
            session.add(
                File(
                    id=file_id, owner_id=owner.user_id, project_id=owner.project_id, filename="rows.jsonl", bytes=5,
                    sha256=SHA, rows=1, format="text", report=None,
                )
            )  # fmt: skip
        return file_id

    def pipeline(self, owner: Actor, file: str) -> str:
        """The id of one that was cancelled before its first job began."""
        step = PlannedStep("only", self.spec(file).model_dump(mode="json"), [])
        with self.database.write() as session:
            made = wishes.create(session, owner, "chain", [], [step]).id
            wishes.cancel(session, owner, made)
        return made

    def sweep(self, owner: Actor, file: str) -> str:
        """The id of one that was cancelled before its runs began."""
        told = {"type": "grid", "fields": {}, "metric": "train_loss", "goal": "min", "halving": None}
        with self.database.write() as session:
            made = sweeps.create(session, owner, "rates", told, [({"training.seed": 1}, self.spec(file))]).id
            sweeps.cancel(session, owner, made)
        return made

    def spec(self, file: str) -> JobSpec:
        source = {"type": "file", "id": file, "format": "text"}
        return resolve(JobSpec.model_validate({"name": "same name", "model": MODEL, "data": {"train": source}}))

    def job(self, owner: Actor, file: str) -> str:
        """One that has succeeded, with an artifact, a log and metrics."""
        with self.database.write() as session:
            job_id = submit(session, owner, self.spec(file)).id
        with self.database.write() as session:
            won = claim(session, "worker-x", "box", Slot(f"p-{job_id}", "prepare"), 600)
            assert won is not None and won.token.job_id == job_id
            finish(session, won.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
            won = claim(session, "worker-x", "box", Slot(f"c-{job_id}", "cpu"), 600)
            assert won is not None and won.token.job_id == job_id
            running(session, won.token)
            names = ("a.bin", "adapter/a.safetensors", "run_record.json")
            artifacts = [{"path": name, "kind": "x", "bytes": 4, "sha256": "0" * 64} for name in names]
            finish(session, won.token, "train", Succeeded({}, artifacts), 0, RetryPolicy())
        folder = self.layout.artifacts(job_id, won.token.attempt)
        (folder / "adapter").mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(b"mine")
        (folder.parent / "log.txt").write_bytes(b"mine")
        self.checkpoint(job_id, won.token.attempt)
        return job_id

    def checkpoint(self, job_id: str, attempt: int = 2, step: int = 10, content: bytes = b"mine") -> str:
        """The id of a checkpoint of a job, written as a trainer writes it, where there is none yet."""
        folder = self.layout.attempt(job_id, attempt) / "checkpoints" / f"step-{step:08d}"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            (folder / "state").write_bytes(content)
            listed = {"state": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
            (folder / "manifest.json").write_text(json.dumps({"files": listed}))
        return f"{folder.name}@{attempt}"


@contextmanager
def world(folder: Path, database_url: str = "", **settings: Any) -> Iterator[World]:
    with mock.patch.object(base_forks, "launch", forks.launch):
        made = World(folder, database_url, **settings)
        try:
            yield made
        finally:
            made.close()
