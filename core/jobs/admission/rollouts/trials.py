"""Trials of rewards: rows of `jobs` that answer prompts with the untrained model and train nothing. Claims, leases and
events are those of any job. What one has found decides whether a training on the same rewards is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from core.db.tables import TRIALS, File, Job
from core.errors import Fault, NotFound
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor
from core.plan.constants import MOST_ALIKE
from core.spec.axes.data import FileSource, singles
from core.spec.axes.rollout.stages import ONLY_LEARNING, RolloutStage
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
    found = [
        (trial_id, JobSpec.model_validate(tried), result)
        for trial_id, tried, result in session.execute(query.order_by(Job.id.desc()).limit(NEWEST))
        if result is not None
    ]
    contents = _contents(session, project_id, [spec, *(tried for _, tried, _ in found)]) if found else {}
    wanted = _answered_by(spec, contents)
    for trial_id, tried, result in found:
        if _answered_by(tried, contents) != wanted:
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


def _contents(session: Session, project_id: str, specs: Sequence[JobSpec]) -> dict[str, str]:
    """Hashes of the uploaded files with prompts, by their ids."""
    sources = [source for spec in specs for _, source in singles(spec.data.train, "")]
    named = {source.id for source in sources if isinstance(source, FileSource)}
    query = select(File.id, File.sha256).where(File.project_id == project_id, File.id.in_(named))
    return {found.id: found.sha256 for found in session.execute(query)}


def _answered_by(spec: JobSpec, contents: Mapping[str, str]) -> tuple[Any, ...]:
    """What answers and rewards depend on, the seed aside. Two uploads of one file are the same prompts."""
    written = spec.model_dump(mode="json")
    data, stage = written["data"], written["stage"]
    uploads = [contents.get(one.id) for _, one in singles(spec.data.train, "") if isinstance(one, FileSource)]
    train = data["train"]
    if uploads and None not in uploads:
        train = _without_ids(train), uploads
    return (
        written["model"],
        train,
        data["split"],
        data["rendering"],
        written["training"]["max_length"],
        {name: value for name, value in stage.items() if name not in ONLY_LEARNING},
    )


def _without_ids(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source, or a mixture of them, without the ids of its files."""
    found = {name: value for name, value in source.items() if not (source["type"] == "file" and name == "id")}
    if source["type"] == "mixture":
        found["sources"] = [one | {"source": _without_ids(one["source"])} for one in source["sources"]]
    return found
