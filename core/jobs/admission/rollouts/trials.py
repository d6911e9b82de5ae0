"""Trials of rewards: rows of `jobs` that answer prompts with the untrained model and train nothing. Claims, leases and
events are those of any job. What one has found decides whether a training on the same rewards is accepted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from core.db.tables import TRIALS, Job
from core.errors import Fault, NotFound
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor
from core.plan.constants import MOST_ALIKE
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.job import JobSpec

NEWEST = 50
"""Trials of a project that are looked through."""


def find(session: Session, actor: Actor, trial_id: str, *, lock: bool = False) -> Job:
    """Raises NotFound for another project's as for none."""
    query = select(Job).where(Job.id == trial_id, Job.project_id == actor.project_id, Job.kind == "trial")
    row = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if row is None:
        words = f"there is no trial `{trial_id[:60]}` in this project; `POST /rewards/try` starts one"
        raise NotFound(words, field="trial_id")
    return row


def refusal(session: Session, project_id: str, spec: JobSpec) -> Fault | None:
    """Why a training would teach nothing: what the newest trial of the same model, prompts and rewards has found."""
    if not isinstance(spec.stage, RolloutStage) or spec.stage.force:
        return None
    query = select(Job.id, Job.spec, Job.result).where(
        Job.project_id == project_id, text(TRIALS), Job.status == Status.SUCCEEDED.value
    )
    wanted = _answered_by(spec.model_dump(mode="json"))
    for trial_id, tried, result in session.execute(query.order_by(Job.id.desc()).limit(NEWEST)):
        if result is None or _answered_by(tried) != wanted:
            continue
        if result["share_alike"] <= MOST_ALIKE:
            return None
        return Fault(
            "rewards_do_not_teach",
            f"in {result['groups_alike']} of {result['prompts']} groups of `{trial_id}` all answers had the same "
            "reward, so nothing would be learned from them; use easier or harder prompts, raise stage.num_generations "
            "or stage.temperature, add a reward that tells answers apart, or set `stage.force` to train all the same",
            "stage.reward",
        )
    return None


def _answered_by(spec: dict[str, Any]) -> tuple[Any, ...]:
    """What answers and rewards depend on, the seed aside."""
    data, training = spec["data"], spec["training"]
    return (
        spec["model"],
        data["train"],
        data.get("split"),
        data.get("rendering"),
        training["max_length"],
        {name: value for name, value in spec["stage"].items() if name != "force"},
    )
