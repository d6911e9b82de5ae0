"""What must hold where jobs take several slots and people take slots, nodes and quotas: all or none, closed is closed,
a quota is exact, and nothing that is in a checkpoint is done again. Pure functions of a History, as its other checks.
"""

from __future__ import annotations

from collections import defaultdict

from tests.support.chaos.checking import CLOCKS, Check
from tests.support.chaos.history import History, Span

TOGETHER = 1.0
"""Seconds within which the rows of one claim are written, each with a look at the clock of its own."""
TURNS = 1.0
"""A quota that is set and a claim of that moment may have seen one another or not."""


def gangs(history: History) -> Check:
    """A job of k slots trains on k slots of one node, taken and given back together; everything else takes one."""
    check = Check()
    for (job_id, attempt), spans in _by_attempt(history).items():
        where = f"{job_id} attempt {attempt}"
        trains = history.kinds.get((job_id, attempt)) == "train"
        wanted = history.gpus.get(job_id, 1) if trains else 1
        places = {(span.node, span.slot) for span in spans}
        check.that(len(spans) == wanted and len(places) == wanted, f"{where}: {wanted} slots wanted, had {spans}")
        check.that(len({span.node for span in spans}) == 1, f"{where}: of several nodes: {spans}")
        starts = [span.start for span in spans]
        stops = [span.end for span in spans if span.end is not None]
        check.that(max(starts) - min(starts) < TOGETHER, f"{where}: not taken together: {spans}")
        check.that(
            not stops or (len(stops) == len(spans) and max(stops) - min(stops) < TOGETHER),
            f"{where}: not given back together: {spans}",
        )
    return check


def closed(history: History) -> Check:
    """Nothing is claimed on a slot that is held or drained, nor on a node that is drained."""
    check = Check()
    for one in history.closed:
        until = float("inf") if one.until is None else one.until
        for span in history.allocations:
            if span.node != one.node or one.slot not in (None, span.slot):
                continue
            within = one.since + CLOCKS < span.start < until - CLOCKS
            check.that(not within, f"{one.what}: {one}, and {span}")
    return check


def quotas(history: History) -> Check:
    """No more jobs of the project train at once than its quota allows at the moment of a claim."""
    check = Check()
    training = {
        of: (min(span.start for span in spans), max(span.end or float("inf") for span in spans))
        for of, spans in _by_attempt(history).items()
        if history.kinds.get(of) == "train"
    }
    for of, (since, _) in training.items():
        in_force = [one for one in history.quotas if one.at <= since - TURNS][-1:]
        in_force += [one for one in history.quotas if since - TURNS < one.at <= since + CLOCKS]
        if not in_force or any(one.max_running is None for one in in_force):
            continue
        most = max(one.max_running for one in in_force if one.max_running is not None)
        at_once = sum(begun <= since < over for begun, over in training.values())
        check.that(at_once <= most, f"{of} began as one of {at_once} that ran at once, and the quota was {most}")
    return check


def repeats(history: History) -> Check:
    """No step is done again that lies in a checkpoint which its trainer told of: of earlier attempts, and of the jobs
    that this one is a retry of."""
    check = Check()
    for job_id in history.jobs:
        kept, chain = 0, [job_id]
        while (parent := history.jobs[chain[-1]].retry_of) is not None and parent in history.jobs:
            chain.append(parent)
        for one in reversed(chain):
            for attempt in sorted(number for job, number in history.folders if job == one):
                lines = history.folders[one, attempt].lines
                steps = [line["step"] for line in lines if line["type"] == "metrics"]
                if one == job_id and steps:
                    check.that(
                        steps[0] > kept, f"{job_id} attempt {attempt} did step {steps[0]} again; {kept} were kept"
                    )
                    check.that(steps == sorted(set(steps)), f"{job_id} attempt {attempt} did its steps as {steps}")
                kept = max([kept, *(line["step"] for line in lines if line["type"] == "checkpoint")])
    return check


def _by_attempt(history: History) -> dict[tuple[str, int], list[Span]]:
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in history.allocations:
        found[span.job_id, span.attempt].append(span)
    return found


def at_once(history: History) -> list[Span]:
    """The allocations, one an attempt: from the first of its slots to the last."""
    return [
        Span(job_id, attempt, spans[0].node, "", min(one.start for one in spans), _last([one.end for one in spans]))
        for (job_id, attempt), spans in _by_attempt(history).items()
    ]


def _last(ends: list[float | None]) -> float | None:
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None
