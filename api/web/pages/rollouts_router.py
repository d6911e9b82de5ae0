"""The page of a job's rollouts: what the model answered for a step, and what each answer was rewarded with."""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.auth.policy import Reading
from api.deps import authorise
from api.handles import JobId
from api.jobs import router as jobs
from api.jobs.answers.rollouts_router import MOST, job_rollouts
from api.web import render
from api.web.views import Views

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])

READ = 2000
"""Answers of a rollout that the page sorts and filters at most; `eft rollouts` shows the others."""
ASKED = 16
"""Pages of the API that a page reads at most: each has at most 1 MiB of long answers."""
ROWS = 40
"""Answers on a page."""


class Order(StrEnum):
    """How the answers stand below one another."""

    PROMPT = "prompt"
    BEST = "best"
    WORST = "worst"


@router.get("/ui/jobs/{job_id}/rollouts")
def rollouts_page(
    request: Request,
    job_id: JobId,
    principal: Reading,
    step: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    sort: Order = Order.PROMPT,
    words: Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$")] = "",
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """Answers of one step, sorted by reward or filtered by words over the whole step, not only over this page."""
    views = Views(request, principal)
    job = views.ask(jobs.show_job, job_id=job_id)
    told, answers, more = _answers(views, job_id, step)
    found = [one for one in answers if _has(one, words)]
    if sort is not Order.PROMPT:
        found.sort(key=lambda one: float(one["reward"]), reverse=sort is Order.BEST)
    each = int((job["spec"].get("stage") or {}).get("num_iterations", 1))
    first = told["step"]
    return render.page(
        request,
        "rollouts.html",
        job=job,
        step=first,
        newest=told["newest"],
        mismatch=told["sampler_mismatch_kl"],
        before=first - each if first is not None and first > each else None,
        behind=first + each if first is not None and first < told["newest"] else None,
        sort=sort.value,
        orders=[one.value for one in Order],
        words_given=words,
        read=len(answers),
        more=more,
        found=len(found),
        groups=_groups(found[offset : offset + ROWS], sort),
        offset=offset,
        rows=ROWS,
        rewards=list(dict.fromkeys(name for one in answers for name in one["rewards"])),
    )


def _answers(views: Views, job_id: str, step: int | None) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """(first page of the API, answers of its pages up to `READ` and `ASKED`, whether there are others)."""
    told = views.ask(job_rollouts, job_id=job_id, step=step, offset=0, limit=MOST, tokens=False)
    answers, behind = list(told["data"]), told["next"]
    for _ in range(1, ASKED):
        if behind is None or len(answers) >= READ:
            break
        # the step by its number: without one, a rollout that was made meanwhile would be mixed in
        page = views.ask(job_rollouts, job_id=job_id, step=told["step"], offset=behind, limit=MOST, tokens=False)
        answers += page["data"]
        behind = page["next"]
    return told, [one | {"place": place} for place, one in enumerate(answers)], behind is not None


def _groups(answers: list[dict[str, Any]], sort: Order) -> list[list[dict[str, Any]]]:
    """By prompt: answers to one prompt, which stand beside each other. In another order each stands alone."""
    if sort is not Order.PROMPT:
        return [[one] for one in answers]
    return [list(group) for _, group in groupby(answers, key=lambda one: (one["line"], one["prompt"]))]


def _has(answer: dict[str, Any], words: str) -> bool:
    """Whether all the words are in the prompt or the answer, whatever their case."""
    text = f"{answer['prompt']}\n{answer['completion']}".casefold()
    return all(word in text for word in words.casefold().split())
