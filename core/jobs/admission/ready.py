"""A model has been prepared: its shape is known from now on, and with it what the job takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import Job
from core.errors import SpecError
from core.jobs.admission import auto_method, fit, lengths, shapes
from core.jobs.base.slots import Key, Slot
from core.jobs.kinds import Kind
from core.jobs.scheduling import cluster
from core.jobs.scheduling.cluster import SlotState
from core.plan.models.shape import Shape
from core.spec.axes.rollout.models import model_rewards
from core.spec.job import JobSpec

SHAPE, WHOLE = "shape", "whole"
"""In what a preparation answers: the model's shape, and whether it is that of its files (else of its configuration)."""


@dataclass(frozen=True, slots=True)
class Ready:
    prepared: dict[str, Any]
    """As `jobs.prepared` keeps it."""
    queue_key: str
    refused: SpecError | None


def ready(session: Session, job: Job, prepared: dict[str, Any], *, memory_check: bool) -> Ready:
    """What follows for `job` from the end of its preparation."""
    kept = _without_shapes(prepared)
    about = prepared.get(SHAPE)
    if about is None:
        return Ready(kept, job.queue_key, None)
    spec = auto_method.effective(job.spec, job.settled, job.adjusted or {})
    shapes.remember(session, spec.model, about, replace=bool(prepared.get(WHOLE)))
    named = {name: reward.model for _, name, reward in model_rewards(spec.stage)}
    for one in prepared.get("reward_models", ()):
        if one.get(SHAPE) is not None:
            shapes.remember(session, named[one["reward"]], one[SHAPE])
    if job.kind not in ("train", "session") or not memory_check:
        return Ready(kept, job.queue_key, None)
    shape = shapes.with_scorers(session, spec, Shape.from_dict(about))
    longest = lengths.rows(session, job.project_id, spec).longest
    here = seats(session)
    try:
        if (refused := fit.refusal(spec, shape, longest, here)) is not None:
            return Ready(kept, job.queue_key, refused)
        key = fit.planned(Key.parse(job.queue_key), spec, shape, longest, training(here))
    except SpecError as error:
        return Ready(kept, job.queue_key, error)
    return Ready(kept, str(key), None)


def _without_shapes(prepared: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in prepared.items() if name not in (SHAPE, WHOLE)}
    if "reward_models" in kept:
        kept["reward_models"] = [_without_shapes(one) for one in kept["reward_models"]]
    return kept


def check(session: Session, project_id: str, spec: JobSpec, shape: Shape | None) -> SpecError | None:
    """The same before it is accepted; None where the shape of its model is not known yet. SpecError as of `plan`."""
    if shape is None:
        return None
    shape = shapes.with_scorers(session, spec, shape)
    return fit.refusal(spec, shape, lengths.rows(session, project_id, spec).longest, seats(session))


def seats(session: Session) -> list[SlotState]:
    """The slots of all registered nodes. A silent node counts: it may come back before the job starts."""
    now = read_now(session)
    return cluster.slot_states(session, now, silent_after=math.inf)


def training(seats: list[SlotState]) -> list[Slot]:
    return [seat.slot for seat in seats if seat.slot.phase == Kind.TRAIN]
