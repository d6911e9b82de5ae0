"""The page that holds jobs beside each other."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.auth.policy import Reading
from api.deps import App, authorise
from api.errors import BadRequest
from api.jobs.answers.samples_router import job_samples
from api.jobs.router import show_job
from api.web import render, words
from api.web.figures import ended_rewards
from api.web.views import Views
from core.jobs.views import handles

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
MOST = 20


@router.get("/ui/compare")
def compare_page(
    request: Request,
    principal: Reading,
    app: App,
    job: Annotated[list[str] | None, Query(max_length=MOST)] = None,
) -> Response:
    """Up to 20 jobs: curves over each other, the fields in which their specs differ, results and samples."""
    views = Views(request, principal)
    given = list(dict.fromkeys(job or ()))
    if not given:
        raise BadRequest("choose the jobs to compare in the list of jobs", field="job")
    with app.database.read() as session:
        ids = list(
            dict.fromkeys(
                one if handles.JOB.is_id(one) else handles.resolve(session, principal, handles.JOB, one)
                for one in given
            )
        )
    jobs = [views.ask(show_job, job_id=one) for one in ids]
    differences = [row for row in words.changed([one["spec"] for one in jobs]) if row[0] != "name"]
    return render.page(
        request,
        "compare.html",
        jobs=jobs,
        names=_names(jobs),
        rewards=ended_rewards(app, jobs),
        differences=[row for row in differences if words.NOTHING not in row[1]],
        partly=[row for row in differences if words.NOTHING in row[1]],
        samples=_samples(views, ids),
    )


def _names(jobs: list[dict[str, Any]]) -> list[str]:
    """What tells the jobs apart: their names, with the end of the id where two have one."""
    plain = [job["name"] or job["id"] for job in jobs]
    return [
        name if plain.count(name) == 1 else f"{name} ({words.short(job['id'])})"
        for name, job in zip(plain, jobs, strict=True)
    ]


def _samples(views: Views, ids: list[str]) -> list[dict[str, Any]]:
    """One row a prompt, with the newest answer of every job; None where it has none."""
    rows: dict[str, dict[str, Any]] = {}
    for place, job_id in enumerate(ids):
        for one in views.ask(job_samples, job_id=job_id, step=None)["data"]:
            row = rows.setdefault(
                one["prompt"], {"prompt": one["prompt"], "reference": one["reference"], "answers": [None] * len(ids)}
            )
            row["answers"][place] = one["tuned"]
    return list(rows.values())[:50]
