"""A session as it is submitted, and as the queue sees it: a job without rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from core.spec.axes.data import Data, PathSource
from core.spec.axes.method import LoRA
from core.spec.axes.model import Model
from core.spec.axes.quantization import FrozenFormat
from core.spec.axes.runtime import Resources, SingleDevice
from core.spec.axes.training import Training
from core.spec.base import SpecModel
from core.spec.job import JobName, JobSpec, Note, Tags
from core.spec.session.method import SessionMethod

NO_ROWS = "/dev/null"
"""The training file of a session, which has no rows: what it learns from comes with each operation."""
MetadataText = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00]*$")]


class SessionSpec(SpecModel):
    """A session: a base model that stays resident, with adapters on it. `POST /sessions` accepts it."""

    version: Literal[1] = 1
    """Version of this format."""
    name: JobName | None = None
    """Display name."""
    tags: Tags = Field(default=[])
    """Words to find the session by."""
    note: Note | None = None
    """Free text for people."""
    metadata: Annotated[dict[MetadataText, MetadataText], Field(max_length=32)] = Field(default={})
    """Words of programs by their names; kept as they are."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Priority in the queue, as a job's."""
    model: Model
    """Base model, as a job's."""
    method: SessionMethod = LoRA()
    """`lora`: any number of adapters over a base that stays, each of which may have a method of its own. `full`: one
    model, whose weights are the base's; the session shares its process with no other."""
    quantization: FrozenFormat | None = Field(default=None)
    """Format of the frozen weights: `none`, `int8` or `nf4`."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of matrix products."""
    resources: Resources = SingleDevice()
    """Slot that the session needs."""
    exact: bool = False
    """Let examples go through the model one by one, and have the log-probabilities of generated tokens be those that
    `forward` finds for them, to the bit. It costs a pass for each answer, and small examples share no passes."""
    idle_seconds: Annotated[float, Field(ge=1, le=86_400)] = 300
    """Time without an operation after which the session is parked: its state goes to disk and its slot is free. The
    next operation brings it back."""

    def as_job(self) -> JobSpec:
        """The same as the queue and the trainer know it."""
        return JobSpec(
            name=self.name,
            tags=self.tags,
            note=self.note,
            priority=self.priority,
            model=self.model,
            data=Data(train=PathSource(path=NO_ROWS)),
            method=self.method,
            quantization=self.quantization,
            training=Training(precision=self.precision),
            resources=self.resources,
        )


def is_session(spec: JobSpec) -> bool:
    """Whether a job is the form of a session, or of what else brings no rows."""
    return isinstance(spec.data.train, PathSource) and spec.data.train.path == NO_ROWS
