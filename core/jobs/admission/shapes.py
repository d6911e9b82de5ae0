"""The shapes of models that were prepared here, so that plans need none of their files: API and claims read them from
the database, whatever the data root is."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job, ModelShape
from core.plan.models.shape import ScorerShape, Shape
from core.spec.axes.model import JobModel, Model
from core.spec.axes.rollout.models import model_rewards
from core.spec.job import JobSpec

log = logging.getLogger("eft.jobs")


def key(model: Model) -> str:
    """Key of a model as jobs name it. A hub's branch has the shape that it had when it was last prepared."""
    return hashlib.sha256(json.dumps(model.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _of_parent(session: Session, model: JobModel) -> Shape | None:
    """A job's weights have the shape of those that it began with, unless packed ones were merged into dense ones."""
    document = session.execute(select(Job.spec).where(Job.id == model.id)).scalar_one_or_none()
    if document is None:
        return None
    shape = known(session, JobSpec.model_validate(document).model)
    return None if shape is not None and shape.packed and model.adapter == "merge" else shape


def with_scorers(session: Session, spec: JobSpec, shape: Shape) -> Shape:
    """The shape of a job's model with those of its reward models, as far as they are known here."""
    found = []
    for _, name, reward in model_rewards(spec.stage):
        trained, of = None, known(session, reward.model)
        if isinstance(reward.model, JobModel):
            columns = select(Job.spec, Job.settled).where(Job.id == reward.model.id)
            if (row := session.execute(columns).one_or_none()) is not None:
                trained = JobSpec.model_validate(row.spec | (row.settled["spec"] if row.settled else {}))
        if of is not None:
            found.append(ScorerShape(name, of, trained))
    return replace(shape, scorers=tuple(found))


def remember(session: Session, model: Model, shape: dict[str, Any], *, replace: bool = True) -> None:
    """`replace`: what is known of it may be older."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement = dialect.insert(ModelShape).values(key=key(model), shape=shape)
    if replace:
        changed = {"shape": statement.excluded.shape, "at": db_now()}
        statement = statement.on_conflict_do_update(index_elements=["key"], set_=changed)
    else:
        statement = statement.on_conflict_do_nothing()
    session.execute(statement)


def known(session: Session, model: Model) -> Shape | None:
    """None for a model that was never prepared here, or by a version that noted shapes in another way."""
    shape = session.execute(select(ModelShape.shape).where(ModelShape.key == key(model))).scalar_one_or_none()
    if shape is None:
        return _of_parent(session, model) if isinstance(model, JobModel) else None
    try:
        return Shape.from_dict(shape)
    except (TypeError, KeyError, ValueError) as error:
        log.warning("the shape of a model cannot be read: %s: %s", type(error).__name__, error)
        return None
