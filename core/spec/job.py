"""The job: one versioned model whose every axis carries its discriminator. The product is this file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from core.spec.axes.batching import Batching, Rows
from core.spec.axes.data import DataField
from core.spec.axes.evaluation.tracking import Tracking
from core.spec.axes.export import Exports
from core.spec.axes.method import LoRA, Method
from core.spec.axes.model import Model
from core.spec.axes.optimizer import AdamW, Linear, Optimizer, Schedule
from core.spec.axes.quantization import Quantization
from core.spec.axes.runtime import (
    Checkpoint,
    DiskCheckpoints,
    Evaluation,
    HeldOut,
    Memory,
    NoEvaluation,
    Resident,
    Resources,
    SingleDevice,
)
from core.spec.axes.stage import CPT, SFT, Stage
from core.spec.axes.training import Training
from core.spec.base import SpecModel, short_form

SPEC_VERSION = 1

JobName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,98}[A-Za-z0-9])?$")]
TAG = r"^[A-Za-z0-9](?:[A-Za-z0-9._:/=+-]{0,48}[A-Za-z0-9])?$"
Tag = Annotated[str, StringConstraints(pattern=TAG)]
Tags = Annotated[list[Tag], Field(max_length=20)]
Note = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00]*$")]
WebhookId = Annotated[str, StringConstraints(pattern=r"^hook-[0-9a-z]{26}$")]


JobHandle = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]


class After(SpecModel):
    """A job that has to end before this one starts."""

    job: JobHandle
    """Id, beginning of an id, name, or `last`; the resolved spec has the id."""
    on: Literal["success", "end"] = "success"
    """`success`: it must succeed; if it fails or is cancelled, this job is cancelled. `end`: however it ends."""


AfterJob = Annotated[After, short_form(lambda job: {"job": job}, example="job-01kar3v8x5m2h6n9qst4wyz0bc")]


class JobSpec(SpecModel):
    """A training job: model, data and method. `POST /jobs` accepts it as JSON or YAML."""

    version: Literal[1] = 1
    """Version of this format; arms are only added to it."""
    name: JobName | None = None
    """Display name: letters, digits, space, dot, dash and underscore, at most 100 characters."""
    tags: Tags = Field(default=[])
    """Words to find the job by (`GET /jobs?tag=`): letters, digits and `._:/=+-`, at most 50 characters. They can be
    changed at any time and do not affect training."""
    note: Note | None = None
    """Free text for people, at most 2,000 characters. It can be changed at any time."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Priority in the queue (docs/queue.md): jobs of a higher priority go first, whatever their owners have used. Each
    project has a limit; a job below 0 yields to all others."""
    after: Annotated[list[AfterJob], Field(max_length=20)] = Field(default=[])
    """Jobs that have to end first (docs/queue.md): ids or names of jobs of the project. A retry does not wait for them
    again."""
    model: Model
    """Base model: a hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`, a local folder, or a GGUF file."""
    data: DataField
    """Training rows and held-out rows; a plain string names the training file."""
    stage: Stage = SFT()
    """What the model learns from a row."""
    method: Method = LoRA()
    """Which parameters are trained, and how."""
    quantization: Quantization | None = Field(default=None)
    """Format of the frozen weights. Default: `nf4` with `method: qlora`, otherwise `none`; `method: auto` chooses among
    the values compatible with the rest of the job."""
    optimizer: Optimizer = AdamW()
    """Optimizer and its settings."""
    schedule: Schedule = Linear()
    """Learning rate schedule."""
    batching: Batching = Rows()
    """What goes through the model at once. Default: `rows`; `packed` with `stage: cpt`."""
    training: Training = Training()
    """Training loop: duration, batch sizes, precision, seed."""
    evaluation: Evaluation | None = Field(default=None)
    """Evaluation during training. Default: `held_out` if `data.eval` is given, otherwise `none`. An object without
    `type` is `held_out`."""
    memory: Memory = Resident()
    """Placement of weights, activations and optimizer state."""
    checkpoint: Checkpoint = DiskCheckpoints()
    """Checkpoints for resuming."""
    export: Exports = Field(default=[])
    """Artifacts beside the trained weights (the adapter, or all weights): one entry per format."""
    resources: Resources = SingleDevice()
    """Slots that the job needs."""
    notify: Annotated[list[WebhookId], Field(max_length=10)] = Field(default=[])
    """Ids of webhooks of the project to notify of this job (docs/notices.md), beside those that are notified of all
    jobs."""

    tracking: Tracking = Field(default=[])
    """Programs that are shown the job's curves while it runs (docs/tracking.md)."""

    @property
    def result_metrics(self) -> list[str]:
        """Names of figures that the job's result will have: the training loss, and those of evaluations."""
        held_out = self.evaluation.measured(self.stage.metrics) if isinstance(self.evaluation, HeldOut) else {}
        return ["train_loss", *held_out]

    @field_validator("tags")
    @classmethod
    def _each_tag_once(cls, tags: list[str]) -> list[str]:
        return list(dict.fromkeys(tags))

    @model_validator(mode="after")
    def _steps_of_a_stream(self) -> JobSpec:
        if self.data.streaming and self.training.max_steps is None:
            raise ValueError("`data.streaming` needs `training.max_steps`, because the number of rows is unknown")
        return self

    @model_validator(mode="after")
    def _checkpoints_by_evaluations(self) -> JobSpec:
        without = (self.data.eval is None and self.data.split is None) or isinstance(self.evaluation, NoEvaluation)
        for name in ("keep_best", "metric_bound"):
            if without and getattr(self.checkpoint, name):
                raise ValueError(f"`checkpoint.{name}` goes by evaluations: give `data.eval`, or remove the field")
        return self

    @model_validator(mode="after")
    def _documents_across(self) -> JobSpec:
        across = isinstance(self.stage, CPT) and self.stage.across
        if across and "truncation" in self.training.model_fields_set and self.training.truncation != "split":
            raise ValueError(
                "`stage.across` joins all documents and splits the result, so no document is cut or refused: set "
                "`training.truncation` to `split`, or leave it out"
            )
        return self
