"""`/jobs/{id}/rollouts`: the answers that a step of training has learned from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

from api.auth.policy import Reading
from api.deps import App
from api.errors import Gone
from api.handles import JobId
from api.http.errors import responses
from core.base.attribute_docs import AttributeDocsModel
from core.errors import NotFound
from core.jobs.lifecycle.submit import find
from core.jobs.views import queries
from core.jobs.views.rollouts import newest_rollout, rollout_page
from core.storage.store import ObjectChanged

router = APIRouter(tags=["jobs"])

MOST = 200
"""Answers of a page at most."""
MISMATCH = "sampler_mismatch_kl"

_ANSWER: dict[str, Any] = {
    "line": 12,
    "sample": 0,
    "prompt": "user\n3 + 4?\nassistant\n",
    "completion": "7",
    "turns": None,
    "tokens": 2,
    "finished": True,
    "rewards": {"number": 1.0, "alone": 1.0},
    "reward": 1.2,
    "unscored": {},
    "advantage": 0.87,
    "detail": {
        "words": ["7", "<|im_end|>"], "sampler": [-0.21, -0.01], "trainer": None, "reference": None, "value": None,
        "advantage": None,
    },
}  # fmt: skip


class AnswerTokens(AttributeDocsModel):
    """The tokens of an answer, and what is known of each. A list is null where its numbers are not computed."""

    words: list[str]
    """Text of each token of the model by itself."""
    sampler: list[float]
    """Log-probability of each at the draw."""
    trainer: list[float] | None
    """As training computes it before its first step over them: with `num_iterations` above 1, `ppo`, and `rloo` with
    `beta`."""
    reference: list[float] | None
    """Those of the model that the job began with: with `beta`."""
    value: list[float] | None
    """Reward that the critic expects after each: with `ppo`."""
    advantage: list[float] | None
    """One per token: with `ppo`; the other stages give all tokens that of their answer."""


class RolloutTurn(AttributeDocsModel):
    """A turn of an episode."""

    role: Literal["assistant", "environment"]
    content: str


class RolloutAnswer(AttributeDocsModel):
    """An answer that the model has sampled, and what it was rewarded with."""

    line: int
    """Line of the prompt's row in the training file."""
    sample: int
    """Number of the answer among those to its prompt, from 0."""
    prompt: str
    completion: str
    """The answer; of an episode, everything behind the prompt."""
    turns: list[RolloutTurn] | None
    """The turns of an episode with an environment; null where the answer is one turn."""
    tokens: int
    """Tokens of the answer, those of an environment aside."""
    finished: bool
    """The answer ended by itself, before `max_completion_length`."""
    rewards: dict[str, float]
    """Rewards by name, before their weights."""
    reward: float
    """Weighted sum of the rewards."""
    unscored: dict[str, str]
    """Why there is no reward but 0, by name of the reward: it could not be computed, or not in its time."""
    advantage: float
    """How much better the answer is than the others to its prompt, as the stage counts it."""
    detail: AnswerTokens | None
    """With `tokens=true`; null where a release before it has written the rollout."""


class RolloutList(AttributeDocsModel):
    """Answers of one rollout, those to a prompt side by side."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"newest": 31, "step": 31, "sampler_mismatch_kl": 1.2e-12, "data": [_ANSWER], "next": 50}]
        },
    )
    newest: int | None
    """First step of the newest rollout; null while there is none."""
    step: int | None
    """First step over these answers; with `num_iterations` above 1 the next steps use them too."""
    sampler_mismatch_kl: float | None
    """Divergence between log-probabilities at the draw and in training at `step`; null while the step is not done."""
    data: list[RolloutAnswer]
    next: int | None
    """Send it as `offset` for the next page; null on the last one."""


@router.get(
    "/jobs/{job_id}/rollouts",
    summary="Rollouts of a job",
    response_model=RolloutList,
    response_class=JSONResponse,
    responses=responses(404, 410, 422, 503),
)
def job_rollouts(
    job_id: JobId,
    principal: Reading,
    app: App,
    step: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Answers that this step learned from. Default: the newest.")
    ] = None,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1, description="Leave out so many answers.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST, description="Answers of a page at most.")] = 50,
    tokens: Annotated[bool, Query(description="Also each token of the answers, with what is known of it.")] = False,
) -> Response:
    """The answers that the model sampled for a step of `grpo`, `rloo` or `ppo`, with their rewards and advantages,
    while the job runs and afterwards. A page ends earlier than `limit` where its answers are longer than 1 MiB."""
    with app.database.read() as session:
        job = find(session, principal, job_id)
        attempts, each = job.attempt, int((job.spec.get("stage") or {}).get("num_iterations", 1))
        chosen = None if step is None else (step - 1) // each
    here = (app.store, app.layout, job_id, attempts)
    newest = newest_rollout(*here)
    number = newest if chosen is None else chosen
    page = detail = None
    if number is not None:
        try:
            page = rollout_page(*here, number, skip=offset, limit=limit)
            if tokens and page is not None:
                detail = rollout_page(*here, number, skip=offset, limit=len(page.answers), tokens=True)
        except (ObjectChanged, FileNotFoundError) as error:
            raise Gone("the rollout on the data root is not the file that the trainer wrote") from error
    answers = [] if page is None else page.answers
    details = [] if detail is None else detail.answers
    if cut := 0 < len(details) < len(answers):  # their lines are longer
        answers = answers[: len(details)]
    empty = dict.fromkeys(AnswerTokens.model_fields)
    filled = [
        {
            "unscored": {},
            "turns": None,
            **one,
            "detail": empty | details[at] if details else None,
        }  # older files have less
        for at, one in enumerate(answers)
    ]
    told = None if newest is None else newest * each + 1
    if page is None and step is not None:
        shown = "there are none" if newest is None else f"there are of steps 1 to {(newest + 1) * each}"
        raise NotFound(f"there are no rollouts of step {step}; {shown}", field="step")
    first = None if page is None or number is None else number * each + 1
    with app.database.read() as session:
        mismatch = None if first is None else queries.metric_at(session, job_id, MISMATCH, first)
    return JSONResponse(
        {
            "newest": told,
            "step": first,
            "sampler_mismatch_kl": mismatch,
            "data": [{name: one[name] for name in RolloutAnswer.model_fields} for one in filled],
            "next": offset + len(answers) if page is not None and (page.more or cut) else None,
        }
    )
