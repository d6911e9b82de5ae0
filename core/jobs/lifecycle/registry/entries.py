"""The model registry: entries are made when jobs succeed, tagged by people, and end with their weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import delete, exists, insert, select
from sqlalchemy.orm import Session, aliased

from core.db.tables import Artifact, Job, RegisteredModel
from core.errors import Conflict, NotFound
from core.jobs.admission import parents
from core.jobs.admission.rollouts import reward_models
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.deletion import rows, running_pipeline
from core.jobs.lifecycle.registry import exports
from core.jobs.policies import audit

KINDS: tuple[Literal["adapter", "model"], ...] = ("adapter", "model")
"""Folders of an artifacts folder that hold what a job has trained."""
PREFIX = "model-"
WEIGHTS = ".safetensors"
MOST_TAGS = 32
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Removed:
    """What has no rows any more."""

    job_id: str
    bytes: int
    folders: frozenset[tuple[int, str]]
    """Attempts and folders below their artifacts."""
    exports: tuple[str, ...]
    """Exports that were asked for later."""


def id_of(job_id: str) -> str:
    """Id of the model that a job makes, or that an upload is."""
    return PREFIX + job_id.partition("-")[2]


def register(session: Session, job: Job, paths: Sequence[str]) -> None:
    """Enter what a job that has succeeded hands back. A job without weights has no model."""
    for kind in KINDS:
        if job.kind in parents.MADE_BY and any(
            path.startswith(f"{kind}/") and path.endswith(WEIGHTS) for path in paths
        ):
            row: dict[str, Any] = {"id": id_of(job.id), "name": job.name, "kind": kind, "job_id": job.id, "tags": []}
            owned = {"owner_id": job.owner_id, "project_id": job.project_id}
            session.execute(insert(RegisteredModel).values(**row, **owned))
            return


def reconcile(session: Session) -> None:
    """Enter models whose jobs ended on a worker of a version without a registry, and remove entries whose jobs an API
    of such a version has deleted."""
    session.execute(
        delete(RegisteredModel)
        .where(~exists().where(Job.id == RegisteredModel.job_id))
        .execution_options(synchronize_session=False)
    )
    entered = aliased(RegisteredModel)
    for kind in KINDS:
        missing = (
            select(Job)
            .where(
                Job.kind == "train",
                Job.status == Status.SUCCEEDED.value,
                ~exists().where(entered.job_id == Job.id),
                exists().where(Artifact.job_id == Job.id, Artifact.path.like(f"{kind}/%{WEIGHTS}")),
            )
            .with_for_update(of=Job)
        )
        for job in session.execute(missing).scalars().all():
            register(session, job, [f"{kind}/model.safetensors"])


def find(session: Session, actor: Actor, model_id: str, *, lock: bool = False) -> tuple[RegisteredModel, Job]:
    """A model of the actor's project with the job that made it. Raises NotFound."""
    query = (
        select(RegisteredModel, Job)
        .join(Job, Job.id == RegisteredModel.job_id)
        .where(RegisteredModel.id == model_id, RegisteredModel.project_id == actor.project_id)
    )
    row = session.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        words = f"there is no model `{model_id[:60]}` in this project; `GET /models` lists them"
        raise NotFound(words, field="model_id")
    return row[0], row[1]


def of_jobs(session: Session, actor: Actor, job_ids: Collection[str]) -> dict[str, str]:
    """Job → model, of those jobs of the actor's project that have one."""
    query = select(RegisteredModel.job_id, RegisteredModel.id).where(
        RegisteredModel.job_id.in_(job_ids), RegisteredModel.project_id == actor.project_id
    )
    return {row.job_id: row.id for row in session.execute(query)}


def tag(session: Session, actor: Actor, model_id: str, add: Collection[str], remove: Collection[str]) -> None:
    """Add and remove tags. Raises NotFound, and Conflict beyond MOST_TAGS."""
    model, _ = find(session, actor, model_id, lock=True)
    tags = sorted((set(model.tags) | set(add)) - set(remove))
    if len(tags) > MOST_TAGS:
        words = f"a model has at most {MOST_TAGS} tags, and would have {len(tags)}: remove some"
        raise Conflict(words, field="add", code="too_many_tags")
    if tags != model.tags:
        audit.record(session, actor, "model.tag", model_id, {"from": model.tags, "to": tags})
        model.tags = tags
        session.flush()


def remove(session: Session, actor: Actor, model_id: str) -> Removed:
    """Delete an entry with its exports and the artifacts that lie in folders: weights, formats, cards. Its job keeps
    its history.

    The caller removes the folders. Raises NotFound, and Conflict where another job needs the weights.
    """
    model, job = find(session, actor, model_id, lock=True)
    require_unused(session, job)
    files = select(Artifact).where(Artifact.job_id == job.id, Artifact.path.contains("/"))
    gone = list(session.execute(files).scalars())
    made_later = exports.of_job(session, job)
    size = sum(row.bytes for row in exports.artifacts(session, job).values())
    folders = frozenset((row.attempt, row.path.partition("/")[0]) for row in gone)
    removed = Removed(job.id, size, folders, tuple(export.id for export in made_later))
    told = {"name": model.name, "job": job.id, "files": len(gone), "bytes": removed.bytes}
    for row in [*gone, model]:
        session.delete(row)
    session.flush()
    for export in made_later:
        rows(session, export)
    if job.kind == "upload":
        rows(session, job)
    audit.record(session, actor, "model.delete", model_id, told)
    return removed


def require_unused(session: Session, job: Job) -> None:
    """Raises Conflict where another job, or a running pipeline, needs what this one has made."""
    if (pipeline := running_pipeline(session, job)) is not None:
        words = f"its job is a step of `{pipeline}`, which is running: cancel the pipeline, or wait for its end"
        raise Conflict(words, field="model_id", code="model_in_use")
    if (scored := reward_models.needed_by(session, job)) is not None:
        words = reward_models.words_of_use(scored, "this model")
        raise Conflict(words, field="model_id", code="model_in_use")
    if (child := next(parents.built_on(session, job), None)) is not None:
        raise Conflict(parents.words_of_use(child, "this model"), field="model_id", code="model_in_use")
