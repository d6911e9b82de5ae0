"""The job: one versioned model whose every axis carries its discriminator. The product is this file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from core.spec.axes.data import DataField
from core.spec.axes.model import Model
from core.spec.axes.runtime import Checkpoint, DiskCheckpoints, Evaluation, Memory, Resident, Resources, SingleDevice
from core.spec.axes.training import (
    SFT,
    AdamW,
    Batching,
    Exports,
    Linear,
    LoRA,
    Method,
    Optimizer,
    Quantization,
    Rows,
    Schedule,
    Stage,
    Training,
)
from core.spec.base import SpecModel

SPEC_VERSION = 1

JobName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,98}[A-Za-z0-9])?$")]
WebhookId = Annotated[str, StringConstraints(pattern=r"^hook-[0-9a-z]{26}$")]


class JobSpec(SpecModel):
    """What to train, on what, how. `POST /jobs` takes it as JSON or YAML."""

    version: Literal[1] = 1
    """Version of this format; arms are only ever added to it."""
    name: JobName | None = None
    """For people: letters, digits, space, dot, dash and underscore, up to 100."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Jobs of a higher one go first, whatever their owners have used (docs/queue.md). A project has a limit; below 0 a
    job gives way to all others."""
    model: Model
    """Base model: a hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`, a local folder, or a GGUF file."""
    data: DataField
    """Training rows and held-out rows; a plain string names the training file."""
    stage: Stage = SFT()
    """What is learned from a row."""
    method: Method = LoRA()
    """Which parameters are trained, and how."""
    quantization: Quantization | None = Field(default=None)
    """How the frozen weights are held. Default: `nf4` with `method: qlora`, else `none`; `method: auto` chooses among
    what is compatible with what is written here."""
    optimizer: Optimizer = AdamW()
    """How gradients become updates."""
    schedule: Schedule = Linear()
    """Learning rate over time."""
    batching: Batching = Rows()
    """What goes through the model at once."""
    training: Training = Training()
    """The loop."""
    evaluation: Evaluation | None = Field(default=None)
    """Default: `held_out` when `data.eval` is given, else `none`. An object without `type` is `held_out`."""
    memory: Memory = Resident()
    """What lies where while training."""
    checkpoint: Checkpoint = DiskCheckpoints()
    """What survives a crash."""
    export: Exports = Field(default=[])
    """What the job hands back beside what it trained (the adapter, or all weights): one entry a format."""
    resources: Resources = SingleDevice()
    """What the job occupies."""
    notify: Annotated[list[WebhookId], Field(max_length=10)] = Field(default=[])
    """Ids of webhooks of the project that are told of this job too (docs/notices.md); those for all jobs always are."""

    @model_validator(mode="after")
    def _steps_of_a_stream(self) -> JobSpec:
        if self.data.streaming and self.training.max_steps is None:
            raise ValueError("`data.streaming` needs `training.max_steps`: nobody has counted the rows")
        return self
