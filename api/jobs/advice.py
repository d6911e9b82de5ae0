"""What is to be known of a job before it runs, though nothing is wrong with it."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.jobs import plan
from core.db.tables import File
from core.errors import Fault
from core.jobs import adjust, lengths
from core.plan import advice
from core.spec.data import FileSource, format_of
from core.spec.job import JobSpec
from core.spec.pairs import told
from core.spec.training import Auto, Full, LoRA, Rows

BYTES_A_TOKEN = 4
"""Of a file with text and its JSON around it; an estimate that errs towards more tokens."""


def notices(session: Session, project_id: str, spec: JobSpec, planned: dict[str, Any] | None) -> list[dict[str, Any]]:
    """`planned`: the job's plan, where there is one."""
    found: list[Fault] = []
    if format_of(spec.data.train) == "prompt_completion":
        found.append(Fault("pairs", f"rows of two strings: {told(spec.data.rendering.pairs)}", "data.rendering.pairs"))
    steps, estimated = _steps(session, project_id, spec)
    if steps is not None:
        found += advice.of_steps(spec, steps, estimated=estimated)
    if isinstance(spec.method, Auto) and planned is not None:
        found += _rates(spec, planned)
    return [fault.as_dict() for fault in found]


def _steps(session: Session, project_id: str, spec: JobSpec) -> tuple[int | None, bool]:
    """Optimizer steps as far as they are known, and whether that is an estimate."""
    rows = lengths.rows(session, project_id, spec)
    known, _ = plan.steps(session, project_id, spec, rows)
    if known is not None or isinstance(spec.batching, Rows):
        return known, False
    tokens = rows.epoch_tokens
    if tokens is None:
        train = spec.data.train
        if not isinstance(train, FileSource) or spec.data.split is not None:
            return None, True
        size = session.execute(
            select(File.bytes).where(File.id == train.id, File.project_id == project_id)
        ).scalar_one_or_none()
        if size is None:
            return None, True
        tokens = size // BYTES_A_TOKEN
    step = adjust.micro_batch(spec)[0] * spec.training.gradient_accumulation_steps * spec.resources.gpus
    return max(1, math.ceil(math.ceil(tokens / step) * spec.training.num_train_epochs)), True


def _rates(spec: JobSpec, planned: dict[str, Any]) -> list[Fault]:
    """One for each method that the job would come to on a slot here."""
    found: dict[str, Fault] = {}
    for place in planned["places"]:
        kind = place["method"]["type"]
        where = f" on {place['slots'][0]}" if place["slots"] else ""
        method = Full() if kind == "full" else LoRA()
        fault = advice.of_rate(method, spec.optimizer.learning_rate, where)
        if place["fits"] and fault is not None:
            found.setdefault(kind, fault)
    return list(found.values())
