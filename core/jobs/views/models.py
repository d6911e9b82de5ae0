"""What the registry says of a model: its base, its formats with their figures, where it comes from and its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from core.db.tables import Artifact, Job, Project, RegisteredModel, User
from core.jobs.admission.auto_method import effective
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.lifecycle.registry import exports
from core.jobs.lifecycle.registry.entries import id_of
from core.spec.axes.model import JobModel
from core.spec.run.chain import ModelChain


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """An entry of the registry with all that its job and its artifacts say about it."""

    id: str
    name: str | None
    kind: str
    job: str
    owner: str
    """Name of the user."""
    project: str
    tags: Sequence[str]
    stage: str
    method: str
    base: Mapping[str, Any]
    parent: str | None
    """Id of the model that it was trained from."""
    formats: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any] | None
    bytes: int
    created_at: float


def page(
    session: Session,
    project_id: str,
    *,
    name: str | None = None,
    tag: str | None = None,
    after: str | None = None,
    limit: int = 20,
) -> ResultPage[DescribedModel]:
    """Models of a project, newest first. Raises UnknownCursor when `after` is no model of it."""
    query = _described().where(RegisteredModel.project_id == project_id)
    if after is not None:
        known = select(RegisteredModel.id).where(RegisteredModel.id == after, RegisteredModel.project_id == project_id)
        if session.execute(known).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a model in this project", field="after")
        query = query.where(RegisteredModel.id < after)
    if name is not None:
        query = query.where(RegisteredModel.name == name)
    if tag is not None:
        # Tags have no quotes in them, so that one is found in the list as JSON has it.
        query = query.where(cast(RegisteredModel.tags, Text).contains(f'"{tag}"', autoescape=True))
    rows = session.execute(query.order_by(RegisteredModel.id.desc()).limit(limit + 1)).all()
    shown = rows[:limit]
    items = [_describe(session, *row) for row in shown]
    return ResultPage(items, len(rows) > limit)


def describe(session: Session, model_id: str) -> DescribedModel:
    """A model that is known to be there."""
    return _describe(session, *session.execute(_described().where(RegisteredModel.id == model_id)).one())


def made_from(session: Session, job: Job) -> list[tuple[RegisteredModel, Job]]:
    """Models with this job's weights in them, with the jobs that made them, oldest first."""
    query = (
        select(RegisteredModel, Job)
        .join(Job, Job.id == RegisteredModel.job_id)
        .where(Job.project_id == job.project_id, Job.id != job.id, cast(Job.chain, Text).contains(job.id))
    )
    return [(model, one) for model, one in session.execute(query.order_by(RegisteredModel.id))]


def _described() -> Any:
    return (
        select(RegisteredModel, Job, User.name, Project.name)
        .join(Job, Job.id == RegisteredModel.job_id)
        .join(User, User.id == RegisteredModel.owner_id)
        .join(Project, Project.id == RegisteredModel.project_id)
    )


def _describe(session: Session, model: RegisteredModel, job: Job, user: str, project: str) -> DescribedModel:
    spec = effective(job.spec, job.settled, job.adjusted or {})
    files = list(exports.artifacts(session, job).values())
    before = spec.model.id if isinstance(spec.model, JobModel) else None
    return DescribedModel(
        model.id,
        model.name,
        model.kind,
        job.id,
        user,
        project,
        model.tags,
        "upload" if job.kind == "upload" else spec.stage.type,
        spec.method.type,
        _base(job),
        None if before is None else id_of(before),
        _formats(model.kind, exports.outcomes(session, job), files),
        (job.result or {}).get("eval_after"),
        sum(row.bytes for row in files),
        model.created_at,
    )


def _base(job: Job) -> dict[str, Any]:
    """The model at the beginning of the chain, with the commit or the hash that it had."""
    source: Mapping[str, Any]
    if job.chain is not None:
        chain = ModelChain.model_validate(job.chain)
        if chain.root is None:
            assert chain.weights is not None  # a chain begins with one of both
            return {"type": "job", "id": chain.weights.job, "sha256": chain.weights.sha256}
        named, source = chain.root.model_dump(mode="json"), chain.root_source
    else:
        named, source = job.spec["model"], (job.prepared or {}).get("source") or {}
    return {**named, **{key: source[key] for key in ("commit", "sha256") if key in source}}


def _formats(kind: str, outcomes: Sequence[Mapping[str, Any]], files: Sequence[Artifact]) -> list[dict[str, Any]]:
    """What was trained, then each export; those that were not released say why."""
    size: dict[str, int] = {}
    for row in files:
        folder = row.path.rpartition("/")[0]
        size[folder] = size.get(folder, 0) + row.bytes
    trained = {"folder": kind, "type": kind, "quantization": None, "released": True, "reason": None}
    found = [trained | {"retention": None, "scores": None, "bytes": size.get(kind, 0)}]
    for one in outcomes:
        retention = one.get("retention") or {}
        found.append(
            {
                "folder": one["folder"],
                "type": one["type"],
                "quantization": one.get("quantization"),
                "released": one["released"],
                "reason": one.get("reason"),
                "retention": retention.get("retention"),
                "scores": one.get("scores"),
                "bytes": size.get(one["folder"], 0),
            }
        )
    return found
