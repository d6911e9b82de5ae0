"""The checks of a chaos run can fail: each is handed histories in which what it looks for has gone wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import history as histories
from tests.support.chaos import look, script
from tests.support.chaos.history import Chained, Closed, Folder, History, QuotaSet, Result, Row, Span, Told
from tests.support.chaos.invariants import INVARIANTS, check_all
from tests.support.chaos.look import Seen
from tests.support.chaos.people import Ledger
from tests.support.chaos.processes import wait_until


def told(seq: int, attempt: int, kind: str, at: float, **data: object) -> Told:
    return Told(seq, attempt, kind, at, data)


def good() -> History:
    """Two jobs: `a` was claimed three times and has succeeded, `b` was cancelled while it waited; `c` is its retry."""
    ledger = Ledger(
        accepted={"a": ("run-1", 0), "b": ("run-2", 1)},
        asked={"run-1", "run-2", "run-3"},
        left={"run-3"},
        cancel_asked={"b"},
        cancel_accepted={"b"},
        retries={"c": "b"},
    )
    reference = [Result("sha-0", [[1, 0.5], [2, 0.4]]), Result("sha-1", [[1, 0.9], [2, 0.8]])]
    history = History(ledger, reference, samples=10)

    def run(job: str, first: float) -> None:
        """Prepared, started, lost, started again, finished."""
        life = [
            (0, None, "queued"),
            (1, "queued", "preparing"),
            (1, "preparing", "queued"),
            (2, "queued", "starting"),
            (2, "starting", "running"),
            (2, "phase", "loading"),
            (2, "running", "queued"),
            (3, "queued", "starting"),
            (3, "starting", "running"),
            (3, "phase", "loading"),
            (3, "running", "succeeded"),
        ]
        for number, (attempt, before, after) in enumerate(life, start=1):
            at = first + number
            event = (
                told(number, attempt, "phase", at, phase=after)
                if before == "phase"
                else told(number, attempt, "status", at, **{"from": before, "to": after})
            )
            history.events.setdefault(job, []).append(event)
        for attempt, start, end, slot in ((1, 2, 3, "prepare-0"), (2, 4, 7, "cpu-0"), (3, 8, 11, "cpu-1")):
            span = Span(job, attempt, "node-a", slot, first + start, first + end)
            history.attempts.append(span)
            history.allocations.append(copy.copy(span))
            history.kinds[job, attempt] = "prepare" if attempt == 1 else "train"
            if job == "c" and attempt > 1:
                history.allocations.append(Span(job, attempt, "node-a", "cpu-2", first + start, first + end))
        history.folders[job, 1] = Folder(files=[("run.json", first + 2.5)])
        for attempt, at in ((2, first + 6), (3, first + 10)):
            lines: list[dict[str, Any]] = [
                {"seq": 1, "time": at, "type": "phase"},
                {"seq": 2, "time": at + 0.5, "type": "metrics", "step": attempt},
            ]
            history.folders[job, attempt] = Folder(lines, [("events.jsonl", at + 0.5)], checkpoints=1)
        history.jobs[job] = Row("succeeded", "run-1" if job == "a" else "run-2", None, 3, len(life), False)
        history.seen[job] = [Seen(e.seq, e.attempt, e.type, e.time) for e in history.events[job]]

    run("a", 100.0)
    run("c", 200.0)
    history.gpus = {"a": 1, "b": 1, "c": 2}
    history.closed = [
        Closed("node-a", "cpu-1", 105.0, 107.5, "hold"),
        Closed("node-a", None, 150.0, 190.0, "node drain"),
        Closed("node-b", None, 0.0, None, "node drain"),
    ]
    history.quotas = [QuotaSet(50.0, 1), QuotaSet(220.0, None)]
    history.jobs["c"].retry_of = "b"
    history.jobs["b"] = Row("cancelled", "run-2", None, 0, 2, False)
    history.events["b"] = [
        told(1, 0, "status", 100.0, **{"from": None, "to": "queued"}),
        told(2, 0, "status", 101.0, **{"from": "queued", "to": "cancelled"}),
    ]
    history.results = {"a": copy.deepcopy(reference[0]), "c": copy.deepcopy(reference[1])}
    history.results["c"].losses.pop(0)  # that step was done by the job it is a retry of
    history.ledger.pipelines = {"p"}
    history.pipelines = {"p": Chained("succeeded", ["a", "c"], ["c", "a"])}
    history.over_http = {job_id: row.status for job_id, row in history.jobs.items()}
    return history


def test_a_good_history_passes_and_everything_was_looked_at() -> None:
    checks = check_all(good())
    assert {name: check.violations for name, check in checks.items()} == {name: [] for name in INVARIANTS}
    assert all(check.looked > 0 for check in checks.values())


def _end_twice(history: History) -> None:
    last = history.events["a"][-1]
    history.events["a"].append(told(12, 3, "status", last.time, **{"from": "succeeded", "to": "succeeded"}))
    history.jobs["a"].event_seq = 12


def _back_from_the_dead(history: History) -> None:
    history.events["b"].append(told(3, 0, "status", 102.0, **{"from": "cancelled", "to": "queued"}))
    history.jobs["b"].event_seq = 3
    history.jobs["b"].status = history.over_http["b"] = "queued"


def _cancelled_succeeds(history: History) -> None:
    history.ledger.cancel_accepted.add("a")


def _late_claim(history: History) -> None:
    history.events["a"][7].attempt = 2
    history.events["a"][6].attempt = 3


def _told_twice(history: History) -> None:
    again = copy.copy(history.events["a"][9])
    history.events["a"].insert(10, again)
    for number, event in enumerate(history.events["a"], start=1):
        event.seq = number
    history.jobs["a"].event_seq = 12
    history.seen["a"] = history.seen["a"][:5]


def _second(history: History) -> Span:
    """The second slot of the second attempt of `c`."""
    return next(span for span in history.allocations if (span.job_id, span.attempt, span.slot) == ("c", 2, "cpu-2"))


def _another(history: History, number: int, **changes: Any) -> Span:
    return dataclasses.replace(history.allocations[number], **changes)


def _kept(history: History) -> None:
    history.folders["a", 2].lines.append({"seq": 3, "time": 106.6, "type": "checkpoint", "step": 5})


DOCTORED: list[tuple[str, str, Callable[[History], object]]] = [
    ("accepted", "was accepted and is not there", lambda h: h.ledger.accepted.update(lost=("run-1", 0))),
    ("accepted", "submitted once and is there 2 times", lambda h: h.jobs.update(d=_like(h, "a"))),
    ("accepted", "sent once and is there 2 times", lambda h: [h.jobs.update({n: _named(h, "run-3")}) for n in "de"]),
    ("accepted", "nobody has submitted", lambda h: h.jobs.update(d=_named(h, "stranger"))),
    ("accepted", "is no retry of", lambda h: setattr(h.jobs["c"], "retry_of", "a")),
    ("accepted", "HTTP says running", lambda h: h.over_http.update(a="running")),
    ("accepted", "500", lambda h: h.ledger.wrong.append("submit of run-9: 500")),
    ("legal", "from queued to running", lambda h: h.events["a"][3].data.update(to="running")),
    ("legal", "went from queued, and was preparing", lambda h: h.events["a"].pop(2)),
    ("legal", "from cancelled to queued", _back_from_the_dead),
    ("ends", "has ended 2 times", _end_twice),
    ("ends", "has ended 0 times", lambda h: h.events["b"].pop()),
    ("ends", "is queued at the end", _back_from_the_dead),
    ("ends", "is failed at the end", lambda h: setattr(h.jobs["a"], "status", "failed")),
    ("ends", "its history ends with", lambda h: setattr(h.jobs["a"], "status", "cancelled")),
    ("ends", "still leased", lambda h: setattr(h.jobs["a"], "leased", True)),
    ("ends", "never published", lambda h: setattr(h, "outbox", 2)),
    ("cancels", "its cancel was accepted", _cancelled_succeeds),
    ("cancels", "nobody asked for it", lambda h: h.ledger.cancel_asked.clear()),
    ("writers", "events are numbered", lambda h: setattr(h.events["a"][4], "seq", 4)),
    ("writers", "11 events, counted 12", lambda h: setattr(h.jobs["a"], "event_seq", 12)),
    ("writers", "attempts [1, 2, 3], counted 2", lambda h: setattr(h.jobs["a"], "attempt", 2)),
    ("writers", "states changed in attempts", _late_claim),
    ("writers", "was seen as", lambda h: setattr(h.events["a"][5], "time", 1.0)),
    ("writers", "nobody has claimed it", lambda h: h.folders.update({("a", 4): Folder()})),
    ("writers", "its trainer numbered", lambda h: h.folders["a", 2].lines[1].update(seq=1)),
    ("writers", "written after attempt 3 began: ['metrics", lambda h: h.folders["a", 2].lines[1].update(time=109.0)),
    ("writers", "['log.txt']", lambda h: h.folders["a", 2].files.append(("log.txt", 108.2))),
    ("writers", "1 lines for the history, 2 in it", _told_twice),
    ("writers", "2 lines for the history, 1 in it", lambda h: h.folders["a", 3].lines[1].update(type="notice")),
    ("slots", "observed words", lambda h: h.observed.append("slots: observed words")),
    ("slots", "has no end", lambda h: setattr(h.allocations[1], "end", None)),
    ("slots", "('node-a', 'cpu-0') twice", lambda h: setattr(h.allocations[1], "end", 299.0)),
    ("slots", "a twice", lambda h: setattr(h.attempts[1], "end", 108.5)),
    ("gangs", "c attempt 2: 2 slots wanted", lambda h: h.allocations.remove(_second(h))),
    ("gangs", "a attempt 2: 2 slots wanted", lambda h: h.gpus.update(a=2)),
    ("gangs", "a attempt 1: 1 slots wanted", lambda h: h.allocations.append(_another(h, 0, slot="prepare-1"))),
    ("gangs", "of several nodes", lambda h: setattr(_second(h), "node", "node-b")),
    ("gangs", "not taken together", lambda h: setattr(_second(h), "start", 206.0)),
    ("gangs", "not given back together", lambda h: setattr(_second(h), "end", 209.0)),
    ("gangs", "not given back together", lambda h: setattr(_second(h), "end", None)),
    ("closed", "hold: ", lambda h: setattr(h.allocations[2], "start", 107.0)),
    ("closed", "node drain: ", lambda h: setattr(h.allocations[0], "start", 151.0)),
    ("closed", "node drain: ", lambda h: h.closed.append(Closed("node-a", None, 99.0, None, "node drain"))),
    ("quotas", "one of 2 that ran at once, and the quota was 1", lambda h: setattr(h.allocations[4], "start", 109.0)),
    ("quotas", "the quota was 0", lambda h: h.quotas.insert(1, QuotaSet(60.0, 0))),
    ("repeats", "a attempt 3 did step 3 again; 5 were kept", _kept),
    ("repeats", "c attempt 2 did step 2 again", lambda h: _kept(h) or setattr(h.jobs["c"], "retry_of", "a")),
    ("repeats", "did its steps as [3, 3]", lambda h: h.folders["a", 3].lines.append(h.folders["a", 3].lines[1])),
    ("weights", "weights sha-x, undisturbed sha-0", lambda h: setattr(h.results["a"], "weights", "sha-x")),
    ("weights", "weights sha-0, undisturbed sha-1", lambda h: setattr(h.results["c"], "weights", "sha-0")),
    ("weights", "its losses are not", lambda h: h.results["a"].losses.pop()),
    ("weights", "c: its losses are not", lambda h: h.results["c"].losses.pop()),
    ("weights", "c: its losses are not", lambda h: h.results["c"].losses.clear()),
    ("weights", "has no result", lambda h: h.results.pop("a")),
    ("weights", "is not the file", lambda h: h.results["a"].faults.append("is not the file")),
    ("pipelines", "was accepted and is not there", lambda h: h.ledger.pipelines.add("q")),
    ("pipelines", "its steps are", lambda h: h.pipelines["p"].jobs.append("b")),
    ("pipelines", "a step was left out", lambda h: h.pipelines["p"].steps.insert(0, None)),
    ("pipelines", "did not go on after", lambda h: h.pipelines["p"].steps.append(None)),
    ("pipelines", "went on after", lambda h: setattr(h.jobs["a"], "status", "cancelled")),
    ("pipelines", "is running, and its jobs", lambda h: setattr(h.pipelines["p"], "status", "running")),
    ("leftovers", "still running", lambda h: h.left.append("still running: 4711")),
    ("leftovers", "not whole: ['step-00000008']", lambda h: h.folders["a", 3].bad_checkpoints.append("step-00000008")),
]


def _like(history: History, job_id: str) -> Row:
    history.events["d"] = history.events[job_id]
    return copy.copy(history.jobs[job_id])


def _named(history: History, name: str) -> Row:
    row = _like(history, "b")
    row.name = name
    history.events["e"] = history.events["b"]
    return row


@pytest.mark.parametrize(("invariant", "words", "doctor"), DOCTORED, ids=[f"{i}-{w}" for i, w, _ in DOCTORED])
def test_a_doctored_history_is_reported(invariant: str, words: str, doctor: Callable[[History], object]) -> None:
    history = good()
    doctor(history)
    found = INVARIANTS[invariant](history).violations
    assert any(words in violation for violation in found), found


# -- what is gathered from the disk and from /proc


def test_what_lies_on_the_disk_is_seen(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run = data / "runs" / "job-1" / "attempt-2"
    for name in ("step-00000008", "step-00000016", "bad-step-00000004", "tmp-step-00000024-17"):
        (run / "checkpoints" / name).mkdir(parents=True)
    whole = run / "checkpoints" / "step-00000008"
    (whole / "state").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (whole / "manifest.json").write_text(json.dumps({"files": {"state": {"sha256": digest}}}))
    (run / "events.jsonl").write_text('{"seq": 1, "time": 5.0, "type": "phase"}\n')
    (data / "uploads").mkdir()
    (data / "uploads" / "file-1.part").touch()
    (data / "models" / ".partial").mkdir(parents=True)
    history = History(Ledger(), [])
    histories.gather_files(history, data)
    folder = history.folders["job-1", 2]
    assert (folder.checkpoints, folder.bad_checkpoints) == (1, ["bad-step-00000004", "step-00000016"])
    assert folder.lines == [{"seq": 1, "time": 5.0, "type": "phase"}]
    assert sorted(history.left) == [
        "left on the disk: runs/job-1/attempt-2/checkpoints/tmp-step-00000024-17",
        "left on the disk: uploads/file-1.part",
    ]
    (whole / "state").write_bytes(b"abd")
    (data / "models" / ".partial" / "gguf").mkdir()
    again = History(Ledger(), [])
    histories.gather_files(again, data)
    assert again.folders["job-1", 2].checkpoints == 0
    assert "left on the disk: models/.partial" in again.left


def test_trainers_at_the_same_time_are_seen(tmp_path: Path) -> None:
    """Processes with a trainer's command line; the second pair shares a slot, the first one a job."""
    database = tmp_path / "eft.db"
    with sqlite3.connect(database) as connection:
        connection.executescript(
            """CREATE TABLE jobs (id, status, attempt, event_seq, spec);
            CREATE TABLE events (job_id, seq, attempt, type, time);
            CREATE TABLE attempts (job_id, attempt, kind);
            CREATE TABLE allocations (node, slot, job_id, attempt, released_at);
            INSERT INTO jobs VALUES ('job-1', 'running', 2, 2, '{"resources": {"gpus": 1}}');
            INSERT INTO jobs VALUES ('job-2', 'running', 1, 0, '{"resources": {"gpus": 3}}');
            INSERT INTO jobs VALUES ('job-3', 'queued', 1, 0, '{"resources": {"gpus": 1}}');
            INSERT INTO events VALUES ('job-1', 1, 1, 'status', 1.0);
            INSERT INTO attempts VALUES ('job-1', 1, 'train'), ('job-1', 2, 'train'), ('job-2', 1, 'train');
            INSERT INTO allocations VALUES ('a', 'cpu-0', 'job-1', 1, 1.5), ('a', 'cpu-1', 'job-3', 1, 1.5);
            INSERT INTO allocations VALUES ('b', 'cpu-0', 'job-1', 2, NULL);
            INSERT INTO allocations VALUES ('b', 'cpu-0', 'job-2', 1, NULL), ('b', 'cpu-1', 'job-2', 1, NULL);"""
        )
    # Written once, before any of them: one that is started while it is written anew would find it empty, and end.
    module = tmp_path / "pretended" / "core" / "train"
    module.mkdir(parents=True)
    (module / "__main__.py").write_text("import time\ntime.sleep(600)\n")
    processes = [_pretend(tmp_path, *run) for run in (("job-1", 1), ("job-1", 2), ("job-2", 1), ("job-3", 1))]
    try:
        wait_until(lambda: len(look.trainers(tmp_path)) == 4, 60, "four trainers")
        observer = look.Observer(f"sqlite:///{database}", tmp_path)
        observer._sample()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = "\n".join(observer.faults)
    assert "slots: two trainers of one job at once" in found
    assert "slots: two trainers on slot ('b', 'cpu-0') at once" in found
    assert "job_id='job-3'" in found and "its job is ('queued', 1)" in found
    assert "slots: ('b', 'cpu-0') is held 2 times" in found
    assert "gangs: job-2 attempt 1 holds 2 of 3 slots" in found
    assert "gangs: job-1" not in found
    assert "('a', 'cpu-0')" not in found
    assert look.trainers(tmp_path) == []

    with sqlite3.connect(database) as connection:
        connection.executescript(
            """UPDATE jobs SET status = 'cancelled', event_seq = 3 WHERE id = 'job-1';
            INSERT INTO events VALUES ('job-1', 3, 1, 'status', 3.0);
            DELETE FROM jobs WHERE id = 'job-3';"""
        )
    observer._sample()
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE jobs SET status = 'succeeded' WHERE id = 'job-1'")
    observer._sample()
    found = "\n".join(observer.faults)
    assert "accepted: jobs have vanished: ['job-3']" in found
    assert "writers: job-1 had 1 events, and the next one is number 3" in found
    assert "ends: job-1 was cancelled and is succeeded" in found


def _pretend(data: Path, job_id: str, attempt: int) -> subprocess.Popen[bytes]:
    """A trainer's command line with nothing behind it."""
    arguments = [sys.executable, "-m", "core.train", str(data / "runs" / job_id / f"attempt-{attempt}")]
    return subprocess.Popen(arguments, cwd=data / "pretended", start_new_session=True)


# -- the script


def test_a_seed_is_a_script() -> None:
    def write(seed: int, database: script.Databases) -> list[script.Action]:
        return script.write(seed, 600, database, fault_every=5, wish_every=5, share_every=5, burst=3)

    assert write(1, "postgres") == write(1, "postgres")
    assert write(1, "postgres") != write(2, "postgres")
    assert {action.kind for action in write(1, "postgres")} == {
        *script.FAULTS,
        *script.WISHES,
        *script.SHARING,
    }
    assert "kill_database" not in {action.kind for action in write(1, "sqlite")}
    times = [action.at for action in write(1, "postgres")]
    assert times == sorted(times) and times[-1] < 600
