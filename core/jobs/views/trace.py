"""A job as a trace: where its time went, as spans, and in the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Attempt, Event, Job, Metric
from core.jobs.base.states import FINAL, Status

MOST_EVENTS = 50_000
"""Events of a job that a trace reads; a job with more says so in `otherData`."""

MOST_STEPS = 20_000
"""Spans of steps; above that, neighbouring steps share one."""

TRACKS = {"status": 1, "attempts": 2, "phases": 3, "steps": 4, "events": 5}
INSTANTS = ("checkpoint", "evaluation", "resumed", "notice", "preempted", "error")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of a job's time, in Unix seconds."""

    track: str
    name: str
    start: float
    end: float | None
    """None: an instant."""
    args: dict[str, Any] = field(default_factory=dict)


def trace(session: Session, job: Job, now: float) -> dict[str, Any]:
    """Spans and instants of the job in microseconds since it was submitted; what has not ended lasts until `now`."""
    found, all_events = spans(session, job, now)
    shown = sorted((_event(one, job.created_at) for one in found), key=lambda one: one["ts"])
    return {
        "displayTimeUnit": "ms",
        "otherData": {"job": job.id, "began": job.created_at, "all_events": all_events},
        "traceEvents": [*_names(job), *shown],
    }


def spans(session: Session, job: Job, now: float, *, steps: bool = True) -> tuple[list[TraceSpan], bool]:
    """(spans and instants of the job, whether all its events are in them). `steps`: with a span for each step."""
    query = select(Event).where(Event.job_id == job.id, Event.type.in_(("status", "phase", *INSTANTS)))
    events = session.execute(query.order_by(Event.seq).limit(MOST_EVENTS)).scalars().all()
    attempts = (
        session.execute(select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.attempt)).scalars().all()
    )
    end = job.finished_at or now
    ends = {one.attempt: one.ended_at or end for one in attempts}
    phases = [one for one in events if one.type == "phase"]
    found = [
        *_statuses(job, [one for one in events if one.type == "status"], now),
        *(_attempt(one, ends[one.attempt]) for one in attempts),
        *_phases(phases, ends, end),
        *(_steps(session, job.id, phases, attempts) if steps else ()),
        *(TraceSpan("events", one.type, one.time, None, _about(one)) for one in events if one.type in INSTANTS),
    ]
    return found, len(events) < MOST_EVENTS


def _names(job: Job) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": job.name or job.id}}
    tracks = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in TRACKS.items()
    ]
    return [process, *tracks]


def _event(one: TraceSpan, began: float) -> dict[str, Any]:
    """Both ends are rounded, not the length, so that neighbours do not overlap."""
    ts = _micros(one.start - began)
    length = {"ph": "i", "s": "t"} if one.end is None else {"ph": "X", "dur": max(_micros(one.end - began) - ts, 0)}
    return {
        **length,
        "pid": 1,
        "tid": TRACKS[one.track],
        "cat": one.track,
        "name": one.name,
        "ts": ts,
        "args": one.args,
    }


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _statuses(job: Job, told: Sequence[Event], now: float) -> list[TraceSpan]:
    """One span for each status that is not final."""
    found = []
    if told and (before := told[0].data.get("from")) is not None:
        found.append(TraceSpan("status", before, job.created_at, told[0].time))
    following: list[float] = [one.time for one in told[1:]]
    for one, end in zip(told, [*following, job.finished_at or now], strict=True):
        status = one.data["to"]
        if Status(status) not in FINAL:
            args = {"seq": one.seq, "attempt": one.attempt, "reason": one.data.get("reason")}
            found.append(TraceSpan("status", status, one.time, end, args))
    return found


def _attempt(one: Attempt, end: float) -> TraceSpan:
    args = {"attempt": one.attempt, "node": one.node, "slot": one.slot, "outcome": one.outcome}
    return TraceSpan("attempts", one.kind, one.started_at, end, args)


def _phases(told: Sequence[Event], ends: dict[int, float], last: float) -> list[TraceSpan]:
    """A phase lasts until the attempt's next one, or until the attempt ends."""
    following: list[Event | None] = [*told[1:], None] if told else []
    found = []
    for one, after in zip(told, following, strict=True):
        same = after is not None and after.attempt == one.attempt
        end = after.time if after is not None and same else ends.get(one.attempt, last)
        args = {"seq": one.seq, "attempt": one.attempt}
        found.append(TraceSpan("phases", str(one.data["phase"]), one.time, end, args))
    return found


def _steps(session: Session, job_id: str, phases: Sequence[Event], attempts: Sequence[Attempt]) -> list[TraceSpan]:
    """A step lasts from the report before it, or from the phase that came between, to its own report."""
    query = select(Metric.attempt, Metric.step, Metric.time, Metric.value).where(
        Metric.job_id == job_id, Metric.name == "loss"
    )
    rows = session.execute(query.order_by(Metric.attempt, Metric.step)).all()
    every = max(math.ceil(len(rows) / MOST_STEPS), 1)
    starts = {one.attempt: one.started_at for one in attempts}
    found = []
    for attempt in sorted({row.attempt for row in rows}):
        marks = [one.time for one in phases if one.attempt == attempt]
        own = [row for row in rows if row.attempt == attempt]
        kept = [row for place, row in enumerate(own, 1) if place % every == 0 or place == len(own)]
        before = min(starts.get(attempt, own[0].time), own[0].time)
        place = 0
        for row in kept:
            while place < len(marks) and marks[place] <= row.time:
                before = max(before, marks[place])
                place += 1
            args = {"attempt": attempt, "step": row.step, "loss": row.value}
            found.append(TraceSpan("steps", f"step {row.step}", before, row.time, args))
            before = row.time
    return found


def _about(one: Event) -> dict[str, Any]:
    return {"seq": one.seq, "attempt": one.attempt, **one.data}
