"""Which model a request means by `model`: a model of the registry, a job, one of its checkpoints, or a base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Artifact, Job, RegisteredModel, User
from core.errors import NotFound, SpecError
from core.jobs.admission import checkpoints, parents
from core.jobs.admission.auto_method import effective
from core.jobs.base.transitions import Actor
from core.jobs.views import handles
from core.spec.axes.method import Full, LoRA
from core.spec.axes.model import JobModel, Model, SourceModel
from core.spec.axes.quantization import packing_of
from core.spec.axes.runtime import SingleDevice
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain
from core.spec.run.folder import ARTIFACTS
from core.spec.serving.request import ServedAdapter
from core.spec.session.job import SessionSpec
from core.storage.store import Store

BASE = "base"
"""Behind `@`: the model that a job was trained from, in the form in which it was trained."""
LISTED = 500
"""Models that are listed, the newest."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served for a name."""

    spec: SessionSpec
    """Base, its format and its slot."""
    chain: ModelChain | None
    """What the base is made of, where jobs have made it."""
    adapter: ServedAdapter | None
    """Folder relative to the data root; None: the base alone."""

    @property
    def base(self) -> str:
        """Hash of the base and of how it is computed."""
        named = {
            "model": None if self.chain is not None else self.spec.model.model_dump(mode="json"),
            "chain": None if self.chain is None else self.chain.merged_key,
            "quantization": None if self.spec.quantization is None else self.spec.quantization.model_dump(mode="json"),
            "precision": self.spec.precision,
            "accelerator": self.spec.resources.accelerator,
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def find(session: Session, actor: Actor, store: Store, name: str) -> ServedModel:
    """The model that `name` means in the actor's project: HANDLE, HANDLE@base, HANDLE@CHECKPOINT, or the id or path of
    a base model of its jobs. Raises NotFound, Conflict for a handle of several, SpecError for what is not served."""
    handle, _, part = name.partition("@")
    job = _job(session, actor, handle)
    if job is None:
        return _of_base(session, actor, name)
    spec = effective(job.spec, job.settled, job.adjusted or {})
    if spec.stage.head != "tokens":
        raise _refused(f"`{job.id}` is of `stage: {spec.stage.type}`; its model judges text and writes none")
    chain = ModelChain.model_validate(job.chain) if job.chain is not None else parents.base_of(job)
    chain = chain.model_copy(update={"adapter": None})
    if part == BASE:
        return _served(spec, chain, None, job)
    if isinstance(spec.method, Full):
        if part:
            raise _refused("checkpoints of a training of all parameters are not served; ask the finished model")
        return _served(spec, ModelChain(weights=parents.handed_back(session, job, "model")), None, job)
    if not isinstance(spec.method, LoRA) or spec.method.modules_to_save or spec.method.new_tokens:
        words = (
            "adapters of LoRA without whole modules and new tokens are served; export the model to serve it elsewhere"
        )
        raise _refused(words)
    if part:
        found = checkpoints.choose(checkpoints.of_job(store, job.id), part, job.id, "model")
        return _served(spec, chain, ServedAdapter(folder=found.key, checkpoint=True, method=spec.method), job)
    attempt = session.execute(
        select(Artifact.attempt).where(Artifact.job_id == job.id, Artifact.path.startswith("adapter/")).limit(1)
    ).scalar_one_or_none()
    if attempt is None:
        raise NotFound(
            f"`{job.id}` ({job.status}) has no model yet: ask a checkpoint (`{handle}@last`), or wait for its end",
            field="model",
            code="model_not_found",
        )
    folder = f"runs/{job.id}/attempt-{attempt}/{ARTIFACTS}/adapter"
    return _served(spec, chain, ServedAdapter(folder=folder), job)


def listed(session: Session, actor: Actor) -> Iterable[tuple[str, float, str]]:
    """Names that can be asked, when they were made and by whom, the newest first: models of the registry by their
    names, or by their ids where a name stands for several, then the base models of jobs."""
    rows = session.execute(
        select(RegisteredModel, Job, User.name)
        .join(Job, Job.id == RegisteredModel.job_id)
        .join(User, User.id == RegisteredModel.owner_id)
        .where(RegisteredModel.project_id == actor.project_id, Job.kind == "train")
        .order_by(RegisteredModel.id.desc())
        .limit(LISTED)
    ).all()
    names = [model.name for model, _, _ in rows]
    bases: dict[str, float] = {}
    for model, job, user in rows:
        spec = JobSpec.model_validate(job.spec)
        if spec.stage.head != "tokens":
            continue
        name = model.name if model.name is not None and names.count(model.name) == 1 else model.id
        yield name, model.created_at, user
        chain = ModelChain.model_validate(job.chain) if job.chain is not None else parents.base_of(job)
        if chain.root is not None:
            bases.setdefault(_name_of(chain.root), model.created_at)
    for name, made in bases.items():
        yield name, made, BASE


def _job(session: Session, actor: Actor, handle: str) -> Job | None:
    """The job of a handle of a model or a job; None for neither."""
    for kind in (handles.MODEL, handles.JOB):
        try:
            found = handles.resolve(session, actor, kind, handle, field="model")
        except NotFound:
            continue
        query = select(Job).where(Job.project_id == actor.project_id, Job.kind == "train")
        if kind is handles.MODEL:
            query = query.join(RegisteredModel, RegisteredModel.job_id == Job.id).where(RegisteredModel.id == found)
        else:
            query = query.where(Job.id == found)
        job = session.execute(query).scalar_one_or_none()
        if job is not None:
            return job
    return None


def _of_base(session: Session, actor: Actor, name: str) -> ServedModel:
    """A base model of the project's jobs, as the newest of them had it."""
    query = (
        select(Job)
        .where(Job.project_id == actor.project_id, Job.kind == "train", Job.prepared.is_not(None))
        .order_by(Job.id.desc())
        .limit(LISTED)
    )
    for job in session.execute(query).scalars():
        if job.chain is not None:
            continue
        model = JobSpec.model_validate(job.spec).model
        if name and not isinstance(model, JobModel) and name == _name_of(model):
            spec = effective(job.spec, job.settled, job.adjusted or {})
            return _served(spec.model_copy(update={"quantization": None}), parents.base_of(job), None, job)
    words = (
        f"there is no model `{name[:80]}` in this project: `GET /v1/models` lists what can be asked, and "
        "JOB@CHECKPOINT and JOB@base can be asked too"
    )
    raise NotFound(words, field="model", code="model_not_found")


def _served(spec: JobSpec, chain: ModelChain, adapter: ServedAdapter | None, job: Job) -> ServedModel:
    model: Model
    plain = chain.root is not None and not chain.merges and chain.weights is None
    if plain:
        assert chain.root is not None
        model = chain.root
    else:
        model = JobModel(id=job.id)  # what is prepared is the chain
    wanted = SessionSpec(
        name=None,
        model=model,
        quantization=packing_of(spec.quantization),
        precision="fp32" if spec.training.precision == "fp32" else "auto",
        resources=SingleDevice(accelerator=spec.resources.accelerator),
    )
    return ServedModel(wanted, None if plain else chain, adapter)


def _name_of(model: SourceModel | Any) -> str:
    return str(getattr(model, "id", None) or getattr(model, "path", None) or "")


def _refused(words: str) -> SpecError:
    return SpecError(f"model: {words}", field="model", code="model_not_served")
