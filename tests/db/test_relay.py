"""From events.jsonl to the database: whole lines, once each, under the token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from core.db.engine import Database
from core.db.tables import Attempt, Event, Job, Metric
from core.jobs.lifecycle import claims, relay
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, finish

Make = Callable[..., str]
Row = Callable[[str], Job]


def line(seq: int, type: str, **payload: Any) -> str:
    return json.dumps({"seq": seq, "time": 1000.0 + seq, "type": type, **payload}) + "\n"


def metrics(seq: int, step: int, loss: float) -> str:
    return line(seq, "metrics", step=step, values={"loss": loss, "nothing": None})


@pytest.fixture
def claim(database: Database, make_job: Make) -> Claim:
    make_job()
    return take(database)


def take(database: Database) -> Claim:
    with database.write() as session:
        claim = claims.claim(session, "worker-a", "box", Slot("cpu", "cpu"), 60)
    assert claim is not None
    return claim


def tell(database: Database, claim: Claim, batch: relay.EventBatch, of: int | None = None) -> bool:
    with database.write() as session:
        return relay.relay(session, claim.token, batch, of=of)


def test_a_line_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert relay.read_batch(path, 0) == relay.EventBatch(0)
    whole = line(1, "phase", phase="loading")
    path.write_text(whole + '{"seq": 2, "ty')
    batch = relay.read_batch(path, 0)
    assert [entry["seq"] for entry in batch.lines] == [1]
    assert batch.end == len(whole)
    path.write_text(whole + line(2, "phase", phase="training"))
    assert [entry["seq"] for entry in relay.read_batch(path, batch.end).lines] == [2]


def test_a_long_file_comes_in_batches_and_a_long_line_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        "".join(line(n, "notice", code="x", message="y" * 1000) for n in range(3000))
        + line(3000, "notice", message="z" * 3_000_000)
    )
    offset, seen = 0, []
    while (batch := relay.read_batch(path, offset)).lines:
        seen += [entry["seq"] for entry in batch.lines]
        offset = batch.end
    assert seen == list(range(3001))
    assert offset == path.stat().st_size


def test_what_is_no_event_is_a_defect(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="not an object"):
        relay.read_batch(path, 0)


def test_events_metrics_progress_and_record(database: Database, claim: Claim, row: Row, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        line(1, "phase", phase="training")
        + metrics(2, 1, 5.0)
        + line(3, "progress", step=1, total_steps=10, seconds_left=None)
        + line(4, "evaluation", step=1, values={"eval_loss": 4.0})
        + line(5, "run_record", record={"device": "cpu"})
        + metrics(6, 1, 4.5)  # told again: the later one counts
    )
    batch = relay.read_batch(path, 0)
    assert tell(database, claim, batch)
    assert row(claim.token.job_id).progress == {"step": 1, "total_steps": 10, "seconds_left": None}
    with database.read() as session:
        told = session.execute(select(Event.seq, Event.type).order_by(Event.seq)).all()
        values = dict(list(session.execute(select(Metric.name, Metric.value))))
        attempt = session.execute(select(Attempt)).scalar_one()
        offset = relay.told(session, claim.token.job_id, 1)
    assert [kind for _, kind in told] == ["status", "status", "phase", "evaluation", "run_record"]
    assert [seq for seq, _ in told] == [1, 2, 3, 4, 5]
    assert values == {"loss": 4.5, "eval_loss": 4.0}
    assert attempt.run_record == {"device": "cpu"}
    assert offset == batch.end == path.stat().st_size

    with path.open("a") as file:
        file.write(line(7, "checkpoint", step=7, path="checkpoints/step-7"))
    assert tell(database, claim, relay.read_batch(path, batch.end))
    assert row(claim.token.job_id).progress == {"step": 7, "total_steps": 10, "seconds_left": None}, "as it pauses"


def test_numbers_that_json_has_no_word_for(database: Database, claim: Claim) -> None:
    batch = relay.EventBatch(
        9,
        [
            {"seq": 1, "time": 1.0, "type": "metrics", "step": 1, "values": {"loss": float("nan"), "lr": 1.0}},
            {"seq": 2, "time": 1.0, "type": "notice", "code": "nan", "message": "m", "value": float("inf")},
        ],
    )
    assert tell(database, claim, batch)
    with database.read() as session:
        assert session.execute(select(Metric.name)).scalars().all() == ["lr"]
        assert session.execute(select(Event.data).where(Event.type == "notice")).scalar_one()["value"] == "inf"


def test_an_earlier_attempts_rest_is_told_under_the_new_token(database: Database, claim: Claim, tmp_path: Path) -> None:
    job_id = claim.token.job_id
    path = tmp_path / "events.jsonl"
    first = metrics(1, 1, 5.0)
    path.write_text(first)
    assert tell(database, claim, relay.read_batch(path, 0))
    path.write_text(first + metrics(2, 2, 4.0) + line(3, "checkpoint", step=2, path="checkpoints/step-2"))
    with database.write() as session:
        finish(session, claim.token, "train", Requeued("its worker died"), None, RetryPolicy())
    second = take(database)
    with database.read() as session:
        ((attempt, offset),) = relay.untold(session, job_id, second.token.attempt)
    assert (attempt, offset) == (1, len(first))
    assert tell(database, second, relay.read_batch(path, offset), of=attempt)
    with database.read() as session:
        rows = session.execute(select(Metric.attempt, Metric.step).order_by(Metric.step)).all()
        checkpoint = session.execute(select(Event.attempt).where(Event.type == "checkpoint")).scalar_one()
        assert relay.untold(session, job_id, 2) == [(1, path.stat().st_size)]
        assert relay.told(session, job_id, 2) == 0
    assert rows == [(1, 1), (1, 2)]
    assert checkpoint == 1
