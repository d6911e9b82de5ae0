"""Models that were made elsewhere: entries of the registry that no job has made. Each has a row of `jobs`, which has
ended before it began, so that files, chains, lineage and deletion are those of any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Artifact, Job
from core.errors import Fault, SpecError
from core.jobs.admission import parents
from core.jobs.admission.auto_method import effective
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.registry import entries
from core.jobs.policies import audit, volume
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.plan.models.uploaded import Uploaded
from core.spec.axes.data import Data, PathSource
from core.spec.axes.method import Adapter
from core.spec.axes.model import JobModel, Model, RegistryModel
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.run.chain import HandedBack, ModelChain, WeightFile
from core.spec.session.job import NO_ROWS

KIND = "upload"
ROWLESS = Data(train=PathSource(path=NO_ROWS))
"""Rows of a model whose rows are unknown."""
ATTEMPT = 1
"""Attempt below which the files lie."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Files at their place on the data root, checked."""

    id: str
    found: Uploaded
    files: Sequence[WeightFile]


def record(
    session: Session,
    actor: Actor,
    stored: StoredModel,
    *,
    name: str | None,
    over: JobSpec | None,
    bounds: VolumeLimits = NO_BOUNDS,
) -> str:
    """Enter an uploaded model; its id. `over`: of an adapter, the resolved job that would have trained it. Raises
    SpecsFull, and as `parents.pin`."""
    kind = stored.found.kind
    weights = HandedBack(job=stored.id, attempt=ATTEMPT, folder=kind, files=list(stored.files))
    chain: dict[str, Any] | None = None
    lineage: list[Any] | None = None
    if over is None:
        chain = ModelChain(weights=weights).model_dump(mode="json")
        itself = RegistryModel(id=entries.id_of(stored.id))
        over = resolve(JobSpec(name=name, model=itself, data=ROWLESS, method=stored.found.method))
    elif (pinned := parents.pin(session, actor.project_id, over)) is not None:
        chain, lineage = pinned.chain, pinned.lineage
    document = over.model_dump(mode="json")
    volume.add(session, actor.project_id, document, bounds)
    now = session.execute(select(db_now())).scalar_one()
    session.add(
        Job(
            id=stored.id,
            kind=KIND,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            name=name,
            spec=document,
            accelerator="cpu",
            request_id=actor.request_id,
            resume_from=[],
            chain=chain,
            lineage=lineage,
            status=Status.SUCCEEDED.value,
            reason="uploaded",
            attempt=ATTEMPT,
            result={},
            started_at=now,
            finished_at=now,
        )
    )
    session.flush()
    owned: dict[str, Any] = {"owner_id": actor.user_id, "project_id": actor.project_id}
    for one in stored.files:
        shown: dict[str, Any] = {"path": one.path, "bytes": one.bytes, "sha256": one.sha256}
        session.execute(
            insert(Artifact).values(job_id=stored.id, attempt=ATTEMPT, kind=_kind(one.path), **shown, **owned)
        )
    job = session.execute(select(Job).where(Job.id == stored.id)).scalar_one()
    entries.register(session, job, [one.path for one in stored.files])
    told = {"name": name, "kind": kind, "files": len(stored.files), "bytes": sum(one.bytes for one in stored.files)}
    audit.record(session, actor, "model.upload", entries.id_of(stored.id), told)
    return entries.id_of(stored.id)


def require_whole(session: Session, actor: Actor, base: Model) -> None:
    """SpecError where a base, by its full id, is an adapter that is not to be merged first."""
    if not isinstance(base, JobModel) or base.adapter == "merge":
        return
    query = select(Job).where(Job.id == base.id, Job.project_id == actor.project_id)
    job = session.execute(query).scalar_one_or_none()
    if job is not None and isinstance(effective(job.spec, job.settled, job.adjusted or {}).method, Adapter):
        words = (
            "that model is an adapter itself, and an adapter stands on whole weights: name its base model, or merge it "
            'first (`{"type": "registry", "id": …, "adapter": "merge"}`)'
        )
        fault = Fault("base_is_adapter", words, "base")
        raise SpecError(f"base: {words}", field="base", faults=(fault,), code=fault.code)


def _kind(path: str) -> str:
    name = path.rpartition("/")[2]
    if name == "README.md":
        return "card"
    if name.startswith("adapter_"):
        return "adapter"
    return "model" if name.startswith("model") or name in ("config.json", "generation_config.json") else "tokenizer"
