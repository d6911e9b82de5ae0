"""What is to be known of a job before it runs, though nothing is wrong with it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from api.jobs import plan
from api.jobs.sizing import estimated_tokens
from core.errors import Fault
from core.jobs.admission import lengths
from core.plan import advice
from core.plan.steps import estimated_steps, step_size
from core.spec.axes.batching import Rows
from core.spec.axes.data import format_of
from core.spec.axes.method import Auto
from core.spec.axes.pairs import told
from core.spec.job import JobSpec


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
        tokens = estimated_tokens(session, project_id, spec) if spec.data.split is None else None
        if tokens is None:
            return None, True
    return estimated_steps(spec.training, tokens, step_size(spec)), True


def _rates(spec: JobSpec, planned: dict[str, Any]) -> list[Fault]:
    """One for each method that the job would come to on a slot here."""
    found: dict[str, Fault] = {}
    for place in planned["places"]:
        kind = place["method"]["type"]
        where = f" on {place['slots'][0]}" if place["slots"] else ""
        fault = advice.of_rate(spec, kind, where)
        if place["fits"] and fault is not None:
            found.setdefault(kind, fault)
    return list(found.values())
