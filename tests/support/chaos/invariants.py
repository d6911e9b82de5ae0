"""What must hold after any storm. Each check is a pure function of a History, so that a test can hand it a false one.

The table of transitions is written down here once more, from the issue and not from the code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.support.chaos import shared
from tests.support.chaos.checking import CLOCKS, Check
from tests.support.chaos.history import History, Span

LEGAL = {
    None: "queued",
    "queued": "preparing starting paused cancelled",
    "preparing": "queued pausing stopping failed",
    "starting": "running queued pausing stopping failed",
    "running": "succeeded failed queued pausing stopping",
    "pausing": "paused stopping succeeded failed",
    "paused": "queued cancelled",
    "stopping": "cancelled",
}
FINAL = ("succeeded", "failed", "cancelled")
UNTOLD = ("metrics", "progress", "alive")
"""Lines of events.jsonl that do not become events."""
OF_TRAINERS = ("phase", "evaluation", "checkpoint", "resumed", "notice", "run_record", "result", "error")


def accepted(history: History) -> Check:
    """Every accepted POST is there, exactly once; nothing is there that nobody asked for."""
    check, ledger = Check(), history.ledger
    for words in ledger.wrong:
        check.that(False, words)
    names = Counter(row.name for row in history.jobs.values() if row.retry_of is None)
    for job_id, (name, _) in ledger.accepted.items():
        check.that(job_id in history.jobs, f"{job_id} ({name}) was accepted and is not there")
        check.that(names[name] == 1, f"{name} was submitted once and is there {names[name]} times")
    for name in ledger.left:
        check.that(names[name] <= 1, f"{name} was sent once and is there {names[name]} times")
    for name in names:
        check.that(name in ledger.asked, f"nobody has submitted {name}")
    for new, old in ledger.retries.items():
        check.that(new in history.jobs and history.jobs[new].retry_of == old, f"{new} is no retry of {old}")
    for job_id, row in history.jobs.items():
        check.that(
            history.over_http.get(job_id) == row.status, f"HTTP says {history.over_http.get(job_id)} of {job_id}"
        )
    return check


def legal(history: History) -> Check:
    """Each job's history is a path of the table of transitions, from its birth on."""
    check = Check()
    for job_id in history.jobs:
        last = None
        for data in _changes(history, job_id):
            check.that(data["from"] == last, f"{job_id} went from {data['from']}, and was {last}")
            allowed = LEGAL.get(data["from"], "").split()
            check.that(data["to"] in allowed, f"{job_id} went from {data['from']} to {data['to']}")
            last = data["to"]
    return check


def ends(history: History) -> Check:
    """Each job ends in exactly one final state; none has failed, and none still waits."""
    check = Check()
    for job_id, row in history.jobs.items():
        told = [data["to"] for data in _changes(history, job_id)]
        over = [status for status in told if status in FINAL]
        check.that(len(over) == 1, f"{job_id} has ended {len(over)} times: {told}")
        check.that(told and told[-1] == row.status, f"{job_id} is {row.status}, and its history ends with {told[-1:]}")
        check.that(row.status in ("succeeded", "cancelled"), f"{job_id} is {row.status} at the end")
        check.that(not row.leased, f"{job_id} is {row.status} and still leased")
    check.that(history.outbox == 0, f"{history.outbox} rings were never published")
    return check


def cancels(history: History) -> Check:
    """A cancel that was accepted holds, and nothing else cancels a job."""
    check = Check()
    for job_id in history.ledger.cancel_accepted:
        status = history.jobs[job_id].status if job_id in history.jobs else "not there"
        check.that(status == "cancelled", f"{job_id} is {status}, and its cancel was accepted")
    for job_id, row in history.jobs.items():
        if row.status == "cancelled":
            check.that(job_id in history.ledger.cancel_asked, f"{job_id} is cancelled, and nobody asked for it")
    return check


def writers(history: History) -> Check:
    """No two attempts write under one token; what a trainer told stands in the history once, and stays."""
    check = Check()
    starts = {(span.job_id, span.attempt): span.start for span in history.attempts}
    for job_id, row in history.jobs.items():
        events = history.events[job_id]
        numbers = [event.seq for event in events]
        check.that(numbers == list(range(1, len(numbers) + 1)), f"{job_id}: events are numbered {numbers}")
        check.that(len(numbers) == row.event_seq, f"{job_id}: {len(numbers)} events, counted {row.event_seq}")
        claimed = sorted(attempt for job, attempt in starts if job == job_id)
        check.that(claimed == list(range(1, row.attempt + 1)), f"{job_id}: attempts {claimed}, counted {row.attempt}")
        of_changes = [event.attempt for event in events if event.type == "status"]
        check.that(of_changes == sorted(of_changes), f"{job_id}: states changed in attempts {of_changes}")
        for seen in history.seen.get(job_id, []):
            now = events[seen.seq - 1] if seen.seq <= len(events) else None
            same = now is not None and (now.attempt, now.type, now.time) == (seen.attempt, seen.type, seen.time)
            check.that(same, f"{job_id}: event {seen.seq} was seen as {seen} and is {now}")
    for (job_id, attempt), folder in history.folders.items():
        where = f"{job_id} attempt {attempt}"
        check.that((job_id, attempt) in starts, f"{where}: a folder, and nobody has claimed it")
        numbers = [line["seq"] for line in folder.lines]
        check.that(numbers == list(range(1, len(numbers) + 1)), f"{where}: its trainer numbered {numbers}")
        _told_once(check, history, job_id, attempt)
        following = starts.get((job_id, attempt + 1))
        if following is None:
            continue
        late = [f"{line['type']} event" for line in folder.lines if line["time"] > following + CLOCKS]
        late += [path for path, changed in folder.files if changed > following + CLOCKS]
        check.that(not late, f"{where}: written after attempt {attempt + 1} began: {late}")
    return check


def _told_once(check: Check, history: History, job_id: str, attempt: int) -> None:
    """Lines of the folder and events of the database are the same, in the same order; an end may be missing where
    nobody could tell it any more, because the job was over."""
    wrote = [
        (line["type"], line["time"]) for line in history.folders[job_id, attempt].lines if line["type"] not in UNTOLD
    ]
    told = [
        (event.type, event.time)
        for event in history.events.get(job_id, [])
        if event.attempt == attempt and event.type in OF_TRAINERS
    ]
    over = job_id in history.jobs and history.jobs[job_id].status == "cancelled"
    whole = told == wrote or (over and told == wrote[: len(told)])
    check.that(
        whole, f"{job_id} attempt {attempt}: {len(wrote)} lines for the history, {len(told)} in it, not the same"
    )


def slots(history: History) -> Check:
    """No slot is leased twice at a time, and no job runs twice at a time; all slots are given back."""
    check = Check(history.samples)
    for words in history.observed:
        check.that(False, words)
    for spans, what in ((history.attempts, "attempts"), (history.allocations, "allocations")):
        for span in spans:
            check.that(span.end is not None, f"{what}: {span} has no end")
        by_place: dict[object, list[Span]] = defaultdict(list)
        for span in spans:
            by_place[span.node, span.slot].append(span)
        for span in spans if spans is history.attempts else shared.at_once(history):
            by_place[span.job_id].append(span)
        for place, held in by_place.items():
            held.sort(key=lambda span: (span.start, span.end or span.start))
            for one, following in pairwise(held):
                apart = one.end is not None and one.end <= following.start
                check.that(
                    apart, lambda one=one, following=following, place=place: f"{place} twice: {one}, {following}"
                )
    return check


def weights(history: History) -> Check:
    """What a job has learned is bitwise what it learns undisturbed; its curve too, without a hole."""
    check = Check()
    for job_id, row in history.jobs.items():
        if row.status != "succeeded":
            continue
        result, number = history.results.get(job_id), history.spec_of(job_id)
        check.that(result is not None, f"{job_id} has succeeded and has no result")
        if result is None or number is None:
            continue  # without its POST's answer: which spec it was is not known here
        wanted = history.references[number]
        check.that(
            result.weights == wanted.weights, f"{job_id}: weights {result.weights}, undisturbed {wanted.weights}"
        )
        # A retry tells of the steps that it did itself, behind the checkpoint of the job it is a retry of.
        losses = wanted.losses[-len(result.losses) :] if row.retry_of is not None else wanted.losses
        check.that(
            result.losses and result.losses == losses, f"{job_id}: its losses are not those of the undisturbed run"
        )
        check.that(not result.faults, f"{job_id}: {result.faults}")
    return check


def pipelines(history: History) -> Check:
    """Each step became one job, after the one before had succeeded; the pipeline ended as its last job did."""
    check = Check()
    for pipeline_id in history.ledger.pipelines:
        check.that(pipeline_id in history.pipelines, f"{pipeline_id} was accepted and is not there")
    for pipeline_id, row in history.pipelines.items():
        made = [job_id for job_id in row.steps if job_id is not None]
        check.that(sorted(row.jobs) == sorted(made), f"{pipeline_id}: its steps are {made}, its jobs {row.jobs}")
        check.that(row.steps[: len(made)] == made, f"{pipeline_id}: a step was left out: {row.steps}")
        ends = [history.jobs[job_id].status for job_id in made if job_id in history.jobs]
        check.that(set(ends[:-1]) <= {"succeeded"}, f"{pipeline_id} went on after {ends}")
        whole = len(made) == len(row.steps)
        check.that(row.status == ends[-1], f"{pipeline_id} is {row.status}, and its jobs {ends}")
        check.that(whole or ends[-1] != "succeeded", f"{pipeline_id} did not go on after {ends}")
    return check


def leftovers(history: History) -> Check:
    """Nothing is left: no process, no temporary file, no checkpoint that is there and not whole."""
    check = Check(1)
    for words in history.left:
        check.that(False, words)
    for (job_id, attempt), folder in history.folders.items():
        check.that(not folder.bad_checkpoints, f"{job_id} attempt {attempt}: not whole: {folder.bad_checkpoints}")
        check.looked += folder.checkpoints
    return check


INVARIANTS = {
    "accepted": accepted,
    "legal": legal,
    "ends": ends,
    "cancels": cancels,
    "writers": writers,
    "slots": slots,
    "gangs": shared.gangs,
    "closed": shared.closed,
    "quotas": shared.quotas,
    "repeats": shared.repeats,
    "weights": weights,
    "pipelines": pipelines,
    "leftovers": leftovers,
}


def check_all(history: History) -> dict[str, Check]:
    return {name: check(history) for name, check in INVARIANTS.items()}


def _changes(history: History, job_id: str) -> Iterator[dict[str, str]]:
    return (event.data for event in history.events[job_id] if event.type == "status")
