"""What people call a job, a model, a file, a pipeline or a webhook: its id, the beginning of its id, or its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, assert_never

from sqlalchemy import ColumnElement, and_, false, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.db.tables import File, Job, Pipeline, RegisteredModel, SweepRow, Webhook
from core.errors import Conflict, NotFound
from core.jobs.base.transitions import Actor
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, Model, RegistryModel
from core.spec.axes.rollout.models import with_models
from core.spec.job import JobSpec

_UPLOAD = re.compile(r"upload-[0-9a-z]{26}")
LAST = "last"
"""The newest one that the caller made."""
SHORTEST = 4
"""Characters of an id, behind its kind, from which a beginning is looked up. The first ones are the time in about 400
days, 12 days and 10 hours: fewer would never be unique."""
SHOWN = 5
"""Candidates that an ambiguous handle lists."""


@dataclass(frozen=True, slots=True)
class Handled:
    """A kind of object that has handles."""

    word: str
    prefix: str
    id: InstrumentedAttribute[str]
    name: InstrumentedAttribute[Any]
    project: InstrumentedAttribute[str]
    owner: InstrumentedAttribute[str]
    others: tuple[ColumnElement[bool], ...] = ()
    """What else a row of the table must be."""

    @property
    def field(self) -> str:
        return f"{self.word}_id"

    def is_id(self, handle: str) -> bool:
        return re.fullmatch(rf"{self.prefix}-[0-9a-z]{{26}}", handle) is not None


JOB = Handled("job", "job", Job.id, Job.name, Job.project_id, Job.owner_id, (Job.kind == "train",))
SESSION = Handled("session", "session", Job.id, Job.name, Job.project_id, Job.owner_id, (Job.kind == "session",))
MODEL = Handled(
    "model",
    "model",
    RegisteredModel.id,
    RegisteredModel.name,
    RegisteredModel.project_id,
    RegisteredModel.owner_id,
)
SWEEP = Handled("sweep", "sweep", SweepRow.id, SweepRow.name, SweepRow.project_id, SweepRow.owner_id)
FILE = Handled("file", "file", File.id, File.filename, File.project_id, File.owner_id)
PIPELINE = Handled("pipeline", "pipe", Pipeline.id, Pipeline.name, Pipeline.project_id, Pipeline.owner_id)
WEBHOOK = Handled("webhook", "hook", Webhook.id, Webhook.name, Webhook.project_id, Webhook.owner_id)


def resolve(session: Session, actor: Actor, kind: Handled, handle: str, *, field: str | None = None) -> str:
    """The id of the object that `handle` means, among those of the actor's project. `field`: where the request has it.

    An id is returned as it is, whether or not it exists. Raises NotFound where nothing has this name or beginning, and
    Conflict with the candidates where several have.
    """
    field = field or kind.field
    if kind.is_id(handle):
        return handle
    if handle == LAST:
        return _last(session, actor, kind, field)
    query = (
        select(kind.id, kind.name)
        .where(kind.project == actor.project_id, *kind.others, or_(kind.name == handle, _begins(kind, handle)))
        .order_by(kind.id.desc())
        .limit(SHOWN + 1)
    )
    match session.execute(query).all():
        case []:
            words = f"there is no {kind.word} `{handle[:60]}` in this project"
            if len(_digits(kind, handle)) < SHORTEST:
                words += f"; the beginning of an id needs at least {SHORTEST} characters after `{kind.prefix}-`"
            raise NotFound(words, field=field)
        case [(found, _)]:
            return str(found)
        case several:
            shown = ", ".join(f"`{found}`" + (f" ({name})" if name else "") for found, name in several[:SHOWN])
            more = ", …" if len(several) > SHOWN else ""
            raise Conflict(
                f"`{handle[:60]}` means several {kind.word}s, newest first: {shown}{more}; give more of the id",
                code="ambiguous_handle",
                field=field,
            )


def _last(session: Session, actor: Actor, kind: Handled, field: str) -> str:
    mine = select(kind.id).where(kind.project == actor.project_id, kind.owner == actor.user_id, *kind.others)
    found = session.execute(mine.order_by(kind.id.desc()).limit(1)).scalar_one_or_none()
    if found is None:
        raise NotFound(f"`last` is your newest {kind.word}, and you have none in this project", field=field)
    return found


def named_models(session: Session, actor: Actor, spec: JobSpec) -> JobSpec:
    """The job with its model, and its reward models, as `named_model` has them."""
    stage = with_models(spec.stage, lambda model, field: named_model(session, actor, model, field=field))
    return spec.model_copy(update={"model": named_model(session, actor, spec.model), "stage": stage})


def named_model(session: Session, actor: Actor, model: Model, *, field: str = "model") -> Model:
    """The model axis of a job with the full id of the job that it names, by whatever handle, or whose entry of the
    registry it names. Raises NotFound and Conflict, as `resolve`."""
    match model:
        case JobModel() if _UPLOAD.fullmatch(model.id):
            return model  # its resolved form: people name its entry of the registry
        case JobModel():
            return model.model_copy(update={"id": resolve(session, actor, JOB, model.id, field=f"{field}.id")})
        case RegistryModel():
            model_id = resolve(session, actor, MODEL, model.id, field=f"{field}.id")
            entry = select(RegisteredModel.job_id).where(
                RegisteredModel.id == model_id, RegisteredModel.project_id == actor.project_id
            )
            job_id = session.execute(entry).scalar_one_or_none()
            if job_id is None:
                raise NotFound(f"there is no model `{model_id}` in this project", field=f"{field}.id")
            return JobModel(id=job_id, adapter=model.adapter)
        case HubModel() | LocalModel() | GGUFModel():
            return model
        case _ as never:
            assert_never(never)


def _begins(kind: Handled, handle: str) -> ColumnElement[bool]:
    """The id begins so, with or without its kind. A range, since every collation sorts digits before letters."""
    digits = _digits(kind, handle)
    if not SHORTEST <= len(digits) <= 26 or re.fullmatch(r"[0-9a-z]+", digits) is None:
        return false()
    first, last = (f"{kind.prefix}-{digits.ljust(26, filler)}" for filler in "0z")
    return and_(kind.id >= first, kind.id <= last)


def _digits(kind: Handled, handle: str) -> str:
    return handle.lower().removeprefix(f"{kind.prefix}-")
