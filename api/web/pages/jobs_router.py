"""The pages of jobs: the list, and one job."""

from __future__ import annotations

import shlex
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.auth.policy import Principal, Reading
from api.deps import After, App, AppState, authorise
from api.handles import JobId
from api.jobs import router as jobs
from api.jobs.answers.samples_router import job_samples
from api.jobs.lineage_router import job_lineage
from api.jobs.output.router import job_logs, job_metrics, list_artifacts
from api.view import iso
from api.web import render, words
from api.web.figures import METRICS, curve_figures, ended_rewards
from api.web.views import Views
from core.errors import EftError
from core.jobs.base.states import FINAL, Status
from core.jobs.lifecycle.registry import entries
from core.jobs.views import queries

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])

ROWS = 100
GROUPS: dict[str, tuple[str, ...]] = {
    "active": ("queued", "preparing", "starting", "running", "pausing", "paused", "stopping"),
    "succeeded": ("succeeded",),
    "failed": ("failed",),
    "cancelled": ("cancelled",),
}
"""Filters of the list: what is under way, and each way to end."""
TOLD = ("status", "resumed", "notice", "error", "priority")
"""Types of events on a job's timeline, beside the newest checkpoints: a long run has thousands of those."""
LATEST = 300
"""Events of the timeline, the newest ones."""
LOG_LINES = 400
LINE_CHARACTERS = 2000
"""Characters of a line of the log that the page shows; `eft logs` has all of them."""
SHOWN_CHECKPOINTS = 5


@router.get("/ui/jobs")
def list_page(
    request: Request,
    principal: Reading,
    app: App,
    show: Annotated[str, Query(max_length=20)] = "",
    name: Annotated[str, Query(max_length=100, pattern=r"^[^\x00]*$")] = "",
    tag: Annotated[str, Query(max_length=64, pattern=r"^[^\x00]*$")] = "",
    metric: Annotated[str, Query(max_length=64, pattern=r"^[^\x00]*$")] = "",
    after: After = None,
) -> Response:
    """The project's jobs, a page of them; the page's script loads more, and filters and sorts the rows that it has.
    With `metric` each row has the last, the smallest and the largest value of that curve."""
    views = Views(request, principal)
    wanted = list(GROUPS.get(show, ()))
    found = views.ask(
        jobs.list_jobs,
        status=wanted or None,
        name=name or None,
        tag=[tag] if tag else None,
        created_after=None,
        limit=ROWS,
        after=after,
    )
    return render.page(
        request,
        "jobs.html",
        jobs=found["data"],
        more=found["next"],
        show=show,
        name=name,
        tag=tag,
        metric=metric,
        metrics=METRICS,
        figures=curve_figures(app, found["data"], metric) if metric else {},
        rewards=ended_rewards(app, found["data"]),
        groups=list(GROUPS),
        first_page=after is None,
    )


@router.get("/ui/jobs/{job_id}")
def job_page(
    request: Request,
    job_id: JobId,
    principal: Reading,
    app: App,
    step: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Response:
    """One job: what it does, its curves, samples, log, timeline, spec, memory and results."""
    views = Views(request, principal)
    job = views.ask(jobs.show_job, job_id=job_id)
    samples = views.ask(job_samples, job_id=job_id, step=step)
    events, phase, seq = _told(app, job_id)
    lineage = views.ask(job_lineage, job_id=job_id)["data"]
    return render.page(
        request,
        "job.html",
        job=job,
        phase=phase if job["status"] == "running" else None,
        sentence=words.now(job, phase if job["status"] == "running" else None, _reward(request, views, job_id)),
        verbs=words.VERBS.get(job["status"], ()) if render.may_write(principal) else (),
        final=Status(job["status"]) in FINAL,
        events=events,
        seq=seq,
        samples=samples,
        newest=_newest(views, job_id, samples),
        artifacts=views.ask(list_artifacts, job_id=job_id)["data"],
        log=_log(views, job_id),
        lineage=lineage if len(lineage) > 1 else [],
        peak=_peak(app, job_id),
        record=_record(app, job_id),
        lines=_lines(request, job),
        checkpoints=[event for event in events if event["type"] == "checkpoint"],
        preview_file=_file_of(job["spec"]),
        writes=render.may_write(principal),
        model=_model_of(app, principal, job_id),
    )


def _reward(request: Request, views: Views, job_id: str) -> words.Figures | None:
    """Last, smallest and largest reward of its steps: the thinned curve, which the page draws too, has them."""
    told = views.ask(
        job_metrics, request=request, job_id=job_id, names="reward", points=500, clock=False, first_step=None,
        last_step=None, format="json",
    ).get("reward")  # fmt: skip
    values = [value for _, value in told or ()]
    return (values[-1], min(values), max(values)) if values else None


def _newest(views: Views, job_id: str, samples: dict[str, Any]) -> dict[str, Any] | None:
    """The newest answers by their rows, where others are shown."""
    if not samples["steps"] or samples["steps"][-1] == samples["step"]:
        return None
    told = views.ask(job_samples, job_id=job_id, step=samples["steps"][-1])
    return {"step": told["step"], "answers": {one["row"]: one["tuned"] for one in told["data"]}}


def _file_of(spec: dict[str, Any]) -> str | None:
    """The file whose rows a preview shows; None where the job has none, or reads several."""
    train = spec["data"]["train"]
    return str(train["id"]) if train["type"] == "file" else None


def _model_of(app: AppState, principal: Principal, job_id: str) -> str | None:
    with app.database.read() as session:
        return entries.of_jobs(session, principal, [job_id]).get(job_id)


def _told(app: AppState, job_id: str) -> tuple[list[dict[str, Any]], str | None, int]:
    """The timeline, newest first; the phase that the trainer reported last; and the number of the newest event. The
    caller has been let in to the job."""
    with app.database.read() as session:
        rows = [
            *queries.newest_events(session, job_id, TOLD, LATEST),
            *queries.newest_events(session, job_id, ["checkpoint"], SHOWN_CHECKPOINTS),
        ]
        phases = queries.newest_events(session, job_id, ["phase"], 1)
        seq = queries.newest_seq(session, job_id)
    reasons = {row.data.get("reason") for row in rows if row.type == "status"}
    told = [
        {"seq": row.seq, "type": row.type, "time": iso(row.time), "attempt": row.attempt, "data": row.data}
        for row in sorted(rows, key=lambda row: -row.seq)
        if row.type != "error" or row.data.get("message") not in reasons  # the status says it
    ]
    return told, phases[0].data.get("phase") if phases else None, seq


def _peak(app: AppState, job_id: str) -> float | None:
    with app.database.read() as session:
        return queries.metric_peak(session, job_id, "memory_bytes")


def _record(app: AppState, job_id: str) -> dict[str, Any] | None:
    """The run record of the newest attempt: versions, device, hashes."""
    with app.database.read() as session:
        rows = queries.newest_events(session, job_id, ["run_record"], 1)
    return rows[0].data.get("record") if rows else None


def _log(views: Views, job_id: str) -> dict[str, str]:
    """The end of the newest attempt's log; the reason in its place where the data root has none to show."""
    try:
        text: str = views.ask(job_logs, job_id=job_id, attempt=None, tail=LOG_LINES, offset=None)
        return {"text": "\n".join(_short_line(line) for line in text.split("\n")), "fault": ""}
    except EftError as error:
        return {"text": "", "fault": error.message}


def _short_line(line: str) -> str:
    more = len(line) - LINE_CHARACTERS
    return line if more <= 0 else f"{line[:LINE_CHARACTERS]} … ({more:,} characters more)"


def _lines(request: Request, job: dict[str, Any]) -> list[tuple[str, str]]:
    """The same in a terminal."""
    address = f"{str(request.base_url).rstrip('/')}/jobs/{quote(job['id'])}"
    curl = 'curl -H "Authorization: Bearer $EFT_API_KEY" '
    return [
        (f"eft show {job['id']}", "this page"),
        (f"eft watch {job['id']}", "follow it"),
        (f"eft logs {job['id']}", "its log"),
        (f"eft metrics {job['id']}", "its metrics"),
        (f"eft download {job['id']}", "its results"),
        (curl + shlex.quote(address), "over HTTP"),
        (curl + shlex.quote(f"{address}/metrics"), "its curves over HTTP"),
    ]
