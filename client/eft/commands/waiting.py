"""Waiting for a job, and the last word on it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eft.conditions import Condition, figures, look_up
from eft.errors import ExitCode, UsageFault
from eft.terminal.output import Output, job_lines, number
from eft.terminal.progress import Follower
from eft.times import seconds
from eft.types import FINAL, Job

if TYPE_CHECKING:
    from eft.client import Client

PatienceOption = Annotated[
    float, typer.Option(help="Seconds for which an unavailable server is retried.", min=0, show_default=True)
]
FailIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="'METRIC > NUMBER'",
        help="Exit with 8 if this holds at the end, or the value is not a finite number. METRIC: a figure of the "
        "result such as eval_loss, or the last value of a metric; < <= > >= == != compare. Can be repeated.",
    ),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        help="Longest time to wait, e.g. 90s, 30m or 2h; then exit with 124. The job continues.",
    ),
]
ENDS = (ExitCode.FAILED, ExitCode.CANCELLED)
"""Exit codes of commands that wait for a job."""


class Deadline:
    """The end of a wait that --timeout bounds. Raises UsageFault for what is not a length of time."""

    def __init__(self, timeout: str | None) -> None:
        self._left = math.inf if timeout is None else seconds(timeout, option="--timeout")
        self._words = timeout
        self._ends = time.monotonic() + self._left

    def check(self, output: Output, job_id: str) -> None:
        """Ends the command when the time is over."""
        if time.monotonic() > self._ends:
            output.note(f"still not at its end after {self._words}; come back with: eft watch {job_id}")
            raise typer.Exit(ExitCode.TIMEOUT)


def conditions(texts: Sequence[str] | None) -> list[Condition]:
    """Raises UsageFault, before anything is sent."""
    return [Condition.parse(text) for text in texts or ()]


def follow(client: Client, output: Output, job_id: str, patience: float, deadline: Deadline | None = None) -> Job:
    """To its end, with a bar or lines on stderr, or until the deadline."""
    with going_on(output, job_id), Follower(output) as follower:
        for snapshot in client.follow(job_id, patience=patience, on_gap=follower.gap):
            follower.feed(snapshot)
            if deadline is not None and not snapshot.job.finished:
                deadline.check(output, job_id)
        return snapshot.job


@contextmanager
def going_on(output: Output, job_id: str | None) -> Generator[None, None, None]:
    """Ctrl-C ends the waiting and not the job (None: the jobs), and says so."""
    try:
        yield
    except KeyboardInterrupt as error:
        output.note(f"the job continues; come back with: eft watch {job_id}" if job_id else "the jobs continue")
        raise typer.Exit(ExitCode.INTERRUPTED) from error


def end(client: Client, output: Output, job: Job, asked: Sequence[Condition] = (), patience: float = 300.0) -> None:
    """The last word on a job that has ended: print it, and exit as it did, or as a condition says."""
    assert job.status in FINAL, job.status
    verdicts = []
    if asked and job.status == "succeeded":
        curves = client.persist(partial(client.metrics, job.id), patience)
        found = figures(job.result, curves)
        try:
            verdicts = [(one, look_up(one.metric, found), one.holds(found)) for one in asked]
        except UsageFault:
            tell(output, job)
            raise
    if output.as_json:
        told = [{"condition": str(one), "value": value, "failed": failed} for one, value, failed in verdicts]
        output.json(job.raw | ({"conditions": told} if asked else {}))
    else:
        tell(output, job)
        for one, value, failed in verdicts:
            output.text(f"{'fails' if failed else 'passes'}: {one} ({one.metric} is {number(value)})\n")
    if job.exit_code == ExitCode.OK and any(failed for _, _, failed in verdicts):
        raise typer.Exit(ExitCode.CONDITION)
    raise typer.Exit(job.exit_code)


def no_result(task: dict[str, Any]) -> UsageFault:
    """Why a task that has ended, a preview or a trial of rewards, has no result."""
    failure = task["failure"] or {"code": task["status"], "message": task["reason"]}
    fault = UsageFault(failure["message"], field=failure.get("field"))
    fault.code = failure["code"]
    return fault


def tell(output: Output, job: Job) -> None:
    """All that there is to say of a job."""
    if output.as_json:
        output.json(job.raw)
        return
    for line in job_lines(job):
        output.data.print(line, soft_wrap=True)
