"""A pipeline: jobs one after another, each from the model of one before it, with gates between (docs/pipelines.md)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from core.errors import Fault, SpecError, plainly
from core.spec.base import SpecModel
from core.spec.job import JobName, WebhookId

StepName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9_-]{0,48}[A-Za-z0-9])?$")]
MetricName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,100}$")]
STAND_IN = "job-" + "0" * 22
"""Beginning of the ids that stand for the jobs of earlier steps until they are submitted; no job has such an id."""
STEP_FIELDS = {"type", "step", "adapter"}


class Gate(SpecModel):
    """A bound that a figure of the step's result must keep, or the pipeline ends as failed."""

    metric: MetricName
    """A held-out figure of the weights that the step hands back, such as `eval_loss`, or `train_loss`."""
    min: float | None = None
    """The least value that passes."""
    max: float | None = None
    """The largest value that passes."""

    @model_validator(mode="after")
    def _bounded(self) -> Gate:
        if self.min is None and self.max is None:
            raise ValueError("a gate needs `min` or `max`")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("`min` is above `max`, so no value passes")
        return self

    def passes(self, value: float | None) -> bool:
        """A figure that the result does not have passes no gate."""
        if value is None or value != value:
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Step(SpecModel):
    """One job of a pipeline."""

    name: StepName
    """Letters, digits, dash and underscore, at most 50; unique in the pipeline."""
    job: dict[str, Any]
    """A job as `POST /jobs` takes it. `model` may be left out: it is then the model of the step before. `model: {step:
    NAME, adapter: merge}` names another step, or says what becomes of its adapter. The `model` of a reward may be
    `{step: NAME}` too."""
    gates: Annotated[list[Gate], Field(max_length=20)] = Field(default=[])
    """Checked when the job has succeeded, before the next step is submitted."""


class PipelineSpec(SpecModel):
    """Jobs in order. `POST /pipelines` accepts it as JSON or YAML."""

    version: Literal[1] = 1
    """Version of this format."""
    name: JobName | None = None
    """Display name: letters, digits, space, dot, dash and underscore, at most 100 characters."""
    steps: Annotated[list[Step], Field(min_length=1, max_length=20)]
    """One after the other; the next is submitted when the one before has succeeded and passed its gates."""
    notify: Annotated[list[WebhookId], Field(max_length=10)] = Field(default=[])
    """Ids of webhooks of the project to notify of this pipeline, beside those that are notified of all. The
    `notify` of a job is for that job."""

    @model_validator(mode="after")
    def _each_name_once(self) -> PipelineSpec:
        names = [step.name for step in self.steps]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two steps are named `{doubled[0]}`")
        return self


def parse_pipeline(raw: Any) -> PipelineSpec:
    """Validate a decoded document. Raises SpecError with one fault a wrong field; the jobs are looked at later."""
    if not isinstance(raw, dict):
        raise SpecError("a pipeline is an object with `steps`", field="steps")
    try:
        return PipelineSpec.model_validate(json.loads(json.dumps(raw)))
    except (TypeError, RecursionError) as error:
        raise SpecError(f"the pipeline has a value that JSON cannot express: {error}", code="invalid_value") from error
    except ValidationError as error:
        faults = []
        for item in error.errors(include_url=False, include_input=False)[:20]:
            field = ".".join(str(part) for part in item["loc"]) or "steps"
            faults.append(Fault("invalid_value", plainly(item["msg"]), field))
        first = faults[0]
        raise SpecError(f"{first.field}: {first.message}", field=first.field, faults=tuple(faults)) from error


def stand_in(number: int) -> str:
    """Id that stands for the job of a step; steps count from 0."""
    return f"{STAND_IN}{number:04d}"


def step_of(job_id: str) -> int | None:
    """The step that an id stands for; None: it is a job's."""
    return int(job_id[len(STAND_IN) :]) if job_id.startswith(STAND_IN) and job_id[len(STAND_IN) :].isdigit() else None


def job_document(spec: PipelineSpec, number: int) -> dict[str, Any]:
    """The job of a step as a document, its model and its reward models named by ids. Raises SpecError for a step that
    is not there."""
    job = spec.steps[number].job
    job = {**job, "model": _of_step(spec, number, job.get("model", {}), f"steps.{number}.job.model")}
    stage = job.get("stage")
    if not isinstance(stage, dict) or not isinstance(stage.get("reward"), list):
        return job
    rewards = []
    for at, one in enumerate(stage["reward"]):
        if isinstance(one, dict) and one.get("type") == "model" and "model" in one:
            place = f"steps.{number}.job.stage.reward.{at}.model"
            one = {**one, "model": _of_step(spec, number, one["model"], place)}
        rewards.append(one)
    return {**job, "stage": {**stage, "reward": rewards}}


def _of_step(spec: PipelineSpec, number: int, model: Any, place: str) -> Any:
    """A model as the job of a step names it, by an id where it is that of an earlier step."""
    if not isinstance(model, dict) or not model.keys() <= STEP_FIELDS or model.get("type", "step") != "step":
        return model
    names = [one.name for one in spec.steps[:number]]
    if not names:
        words = "the first step has no earlier step to start from: name its model"
        raise SpecError(f"{place}: {words}", field=place, code="unknown_step")
    wanted = model.get("step", names[-1])
    if wanted not in names:
        known = ", ".join(f"`{name}`" for name in names)
        field = f"{place}.step"
        raise SpecError(f"{field}: no earlier step has this name; there are {known}", field=field, code="unknown_step")
    adapter = {"adapter": model["adapter"]} if "adapter" in model else {}
    return {"type": "job", "id": stand_in(names.index(wanted)), **adapter}
