"""`/rewards/try`: what answers of the untrained model are rewarded with, before a training is submitted."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth.policy import Reading, Writing
from api.deps import App, AppState
from api.errors import printable
from api.http.body import read_body
from api.http.errors import responses
from api.http.once import Asked, Once, answer, earlier
from api.http.waiting import Wait, asked_for, has_ended, until
from api.jobs.service import JSON_TYPES, Jobs, decode
from api.rewards.schemas import EXAMPLE_ID, SPEC, TrialView, trial_view
from core.errors import NotFound
from core.jobs.admission.rollouts import trials
from core.jobs.lifecycle.submit import Actor, stop, submit
from core.jobs.policies.volume import VolumeLimits

router = APIRouter(tags=["jobs"])

_TRIAL_ID = re.compile(r"trial-[0-9a-z]{26}")
_BODY = {
    "required": True,
    "description": "A job as for `POST /jobs`, of a stage that learns from answers which the model samples.",
    "content": {
        media_type: {"schema": {"$ref": "#/components/schemas/JobSpec"}, "example": SPEC} for media_type in JSON_TYPES
    },
}


async def _trial_id(
    trial_id: Annotated[str, Path(description="Id of a trial.", examples=[EXAMPLE_ID])],
) -> str:
    if not _TRIAL_ID.fullmatch(trial_id):
        raise NotFound(f"there is no trial `{printable(trial_id)}` in this project", field="trial_id")
    return trial_id


TrialId = Annotated[str, Depends(_trial_id)]


@router.post(
    "/rewards/try",
    status_code=202,
    summary="Try the rewards of a job",
    response_model=TrialView,
    response_class=JSONResponse,
    responses={
        200: {"model": TrialView, "description": "It is over already (`wait`)."},
        **responses(404, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def try_rewards(request: Request, principal: Writing, app: App, once: Asked, wait: Wait = 0.0) -> Response:
    """Let the untrained model answer 32 prompts as the job's first steps would, and reward the answers: histogram of
    the rewards, share of groups that teach nothing, truncated answers, tokens and seconds of a step. Nothing is
    trained. It waits for a training slot as the job would, at its priority."""
    body = await read_body(request, app.settings.max_body_bytes)
    content_type = request.headers.get("content-type", "")
    asked = await run_in_threadpool(_ask, app, principal, once, body, content_type)
    return asked_for(asked, await _when_over(app, principal, json.loads(bytes(asked.body))["id"], wait))


@router.get(
    "/rewards/try/{trial_id}",
    summary="Show a trial of rewards",
    response_model=TrialView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
async def show_trial(trial_id: TrialId, principal: Reading, app: App, wait: Wait = 0.0) -> Response:
    """Progress, and the result when it is complete."""
    return JSONResponse(await _when_over(app, principal, trial_id, wait))


@router.post(
    "/rewards/try/{trial_id}/cancel",
    summary="Cancel a trial of rewards",
    response_model=TrialView,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def cancel_trial(trial_id: TrialId, principal: Writing, app: App, once: Asked) -> Response:
    """At once while it waits; otherwise its worker ends the process. Idempotent."""

    def end(session: Session) -> dict[str, Any]:
        return trial_view(stop(session, principal, trials.find(session, principal, trial_id, lock=True)))

    return answer(app, principal, once, None, end)


def _ask(app: AppState, principal: Actor, once: Once, body: bytes, content_type: str) -> Response:
    sent = decode(body, content_type)
    if (found := earlier(app, principal, once, sent)) is not None:
        return found
    jobs = Jobs(app.database, app.settings, app.layout)
    spec = jobs.to_try(principal, sent)

    def ask(session: Session) -> dict[str, Any]:
        jobs.hold_files(session, principal, spec)
        plain = spec.model_copy(update={"name": None, "notify": [], "after": []})
        return trial_view(submit(session, principal, plain, kind="trial", bounds=VolumeLimits.of(app.settings)))

    return answer(app, principal, once, sent, ask, status=202)


async def _when_over(app: AppState, principal: Actor, trial_id: str, wait: float) -> dict[str, Any]:
    """The trial, once it is over or `wait` seconds are."""

    def look() -> dict[str, Any]:
        with app.database.read() as session:
            return trial_view(trials.find(session, principal, trial_id))

    return await until(has_ended, look, wait)
