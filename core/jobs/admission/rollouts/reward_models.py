"""Reward models that jobs have trained, for the answers of another job: what they are pinned to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from core.db.tables import Job
from core.errors import Fault, SpecError
from core.jobs.admission import lineage, parents
from core.jobs.admission.auto_method import effective
from core.jobs.base.states import FINAL
from core.spec.axes.method import Adapter
from core.spec.axes.model import JobModel
from core.spec.axes.rollout.models import model_rewards
from core.spec.job import JobSpec
from core.spec.run.chain import RewardModelPin


def check(session: Session, project_id: str, spec: JobSpec, ahead: Mapping[str, JobSpec] | None = None) -> None:
    """Raises NotFound for a job that the project does not have, and SpecError for one that has not succeeded, or is not
    of `stage: reward`. `ahead`: as of `parents.settle`."""
    for field, _, reward in model_rewards(spec.stage):
        if not isinstance(reward.model, JobModel):
            continue
        place = f"{field}.id"
        if ahead is not None and reward.model.id in ahead:
            trained = ahead[reward.model.id]
        else:
            row = parents.find(session, project_id, reward.model.id, field=place)
            parents.require_succeeded(row, field=place)
            trained = effective(row.spec, row.settled, row.adjusted or {})
        if trained.stage.type != "reward":
            words = (
                f"that job is of `stage: {trained.stage.type}`, whose model gives answers no score; name a job of "
                "`stage: reward`"
            )
            raise parents.refused(Fault("not_a_reward_model", words, place))


def pin(session: Session, project_id: str, spec: JobSpec) -> list[dict[str, Any]] | None:
    """Hashes of the reward models that jobs have trained; None: the job names none. Those jobs cannot be deleted before
    the caller's transaction has ended. Raises as `check`."""
    check(session, project_id, spec)
    found = []
    for field, name, reward in model_rewards(spec.stage):
        if not isinstance(reward.model, JobModel):
            continue
        place = f"{field}.id"
        job = parents.find(session, project_id, reward.model.id, lock=True, field=place)
        trained = effective(job.spec, job.settled, job.adjusted or {})
        try:
            chain = parents.chain(session, job, "continue" if isinstance(trained.method, Adapter) else None)
        except SpecError as error:
            raise parents.refused(Fault(error.code, error.message.removeprefix("model.id: "), place)) from error
        found.append(
            RewardModelPin(
                reward=name,
                field=field,
                chain=chain,
                spec=trained.model_dump(mode="json"),
                lineage=lineage.of_job(session, job),
            ).model_dump(mode="json")
        )
    return found or None


def require(session: Session, project_id: str, pinned: list[dict[str, Any]]) -> None:
    """Raises SpecError where a job whose weights are pinned was deleted; else none of them can be, before the caller's
    transaction has ended."""
    for one in pinned:
        parents.require(session, project_id, one["chain"], field=f"{one['field']}.id")


def needed_by(session: Session, job: Job) -> str | None:
    """The newest job that has not ended and has its answers scored by the model of this job."""
    query = select(Job.id).where(
        Job.project_id == job.project_id,
        Job.status.not_in([status.value for status in FINAL]),
        Job.reward_models.is_not(None),
        cast(Job.reward_models, Text).contains(job.id),
    )
    return session.execute(query.order_by(Job.id.desc()).limit(1)).scalar_one_or_none()


def words_of_use(needs: str, what: str) -> str:
    """Why `what`, a reward model, cannot be deleted while the job `needs` has not ended."""
    return f"the answers of `{needs}` are scored by {what}: cancel `{needs}`, or wait for its end"
