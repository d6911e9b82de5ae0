"""From a child's events.jsonl to the database: in batches, once each, under the attempt's token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Attempt, Job, Metric
from core.jobs.base.transitions import Token, append_events

MAX_BATCH_BYTES = 1 << 20


@dataclass(slots=True)
class EventBatch:
    """Complete lines read from one place of the file; `end` is where the next batch starts."""

    end: int
    lines: list[dict[str, Any]] = field(default_factory=list)


def read_batch(path: Path, offset: int) -> EventBatch:
    """Up to about a MiB of complete lines from `offset`; a line still being written is left for the next time.

    Raises ValueError when a complete line is not a JSON object: the child is ours, so that is a defect.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_BATCH_BYTES)
            while data and not data.endswith(b"\n") and len(data) >= MAX_BATCH_BYTES and b"\n" not in data:
                more = file.read(MAX_BATCH_BYTES)
                if not more:
                    break
                data += more
    except FileNotFoundError:
        return EventBatch(offset)
    complete = data[: data.rfind(b"\n") + 1]
    lines = [json.loads(line) for line in complete.splitlines()]
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path}: an event is not an object")
    return EventBatch(offset + len(complete), lines)


def relay(session: Session, token: Token, batch: EventBatch, *, of: int | None = None) -> bool:
    """Write a batch and move the attempt's offset past it, in the caller's transaction. False: the job is lost.

    `of` names an earlier attempt, whose worker left before it reported everything; the token gives the right to write.
    """
    attempt = token.attempt if of is None else of
    job = session.execute(select(Job).where(*token.holds())).scalar_one_or_none()
    if job is None:
        return False
    values: dict[str, Any] = {}
    for line in batch.lines:
        if line["type"] == "progress" and of is None:
            values["progress_at"] = db_now()
            values["progress"] = {key: value for key, value in line.items() if key not in ("seq", "time", "type")}
    furthest = max((line["step"] for line in batch.lines if line["type"] == "checkpoint"), default=0)
    progress = values.get("progress") or job.progress or {}
    if of is None and furthest > (progress.get("step") or 0):
        # The trainer tells its progress now and then, so that the last word of one that pauses is its checkpoint.
        values["progress"] = {**progress, "step": furthest}
    if furthest > job.furthest_step:  # it gets on: what was lost before counts no more
        values |= {"furthest_step": furthest, "losses": 0, "full_disks": 0, "needs_bytes": None}
    # Metrics have a table of their own, and a bar's every tick is no news.
    told = [
        (line["type"], line["time"], _json_safe({k: v for k, v in line.items() if k not in ("seq", "time", "type")}))
        for line in batch.lines
        if line["type"] not in ("metrics", "progress", "alive")
    ]
    if not append_events(session, job, token.holds(), told, values, attempt=attempt):
        return False
    _metrics(session, job, attempt, [line for line in batch.lines if line["type"] in ("metrics", "evaluation")])
    trained = {}
    if any(line["type"] == "metrics" for line in batch.lines):  # it has done a step
        trained = {"training_at": func.coalesce(Attempt.training_at, db_now())}
    record = next((line["record"] for line in batch.lines if line["type"] == "run_record"), None)
    session.execute(
        update(Attempt)
        .where(Attempt.job_id == job.id, Attempt.attempt == attempt)
        .values(events_offset=batch.end, **trained, **({} if record is None else {"run_record": _json_safe(record)}))
    )
    return True


def told(session: Session, job_id: str, attempt: int) -> int:
    """Bytes of the attempt's events.jsonl that are in the database."""
    query = select(Attempt.events_offset).where(Attempt.job_id == job_id, Attempt.attempt == attempt)
    return session.execute(query).scalar_one()


def untold(session: Session, job_id: str, before: int) -> list[tuple[int, int]]:
    """(attempt, offset) of the attempts before `before`: where each one's events.jsonl was read up to."""
    rows = session.execute(
        select(Attempt.attempt, Attempt.events_offset)
        .where(Attempt.job_id == job_id, Attempt.attempt < before)
        .order_by(Attempt.attempt)
    )
    return [(attempt, offset) for attempt, offset in rows]


def _metrics(session: Session, job: Job, attempt: int, lines: Sequence[dict[str, Any]]) -> None:
    rows = {
        (name, line["step"]): {
            "job_id": job.id,
            "owner_id": job.owner_id,
            "project_id": job.project_id,
            "attempt": attempt,
            "name": name,
            "step": line["step"],
            "value": value,
            "time": line["time"],
        }
        for line in lines
        for name, value in line["values"].items()
        if value is not None and math.isfinite(value)
    }
    if not rows:
        return
    # If a step has two values (say, an evaluation on the last step and one at the end), the later one counts.
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement = dialect.insert(Metric)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["job_id", "name", "step", "attempt"],
            set_={"value": statement.excluded.value, "time": statement.excluded.time},
        ),
        list(rows.values()),
    )


def _json_safe(value: Any) -> Any:
    """JSON has no NaN: PostgreSQL would refuse the row, and a browser the reply."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _json_safe(item) for key, item in value.items()}
        case list():
            return [_json_safe(item) for item in value]
        case _:
            return value
