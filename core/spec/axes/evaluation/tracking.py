"""The tracking axis: programs beside eft that are shown a job's curves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from core.spec.base import SpecModel, by_type, short_form

RESERVED_BEGINNING = "registry-"
RESERVED_ENDS = (
    *("_system", "_configs", "_traces"),
    *("_artifacts", "_artifact_versions", "_artifact_aliases", "_artifact_links"),
)
"""Ends of project names that trackio keeps for itself (SQLiteStorage.validate_project_name)."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._/-]{0,99}$")]


class TensorBoard(SpecModel):
    """Event files that TensorBoard shows, in the folder `tensorboard` of the service's tracking folder."""

    type: Literal["tensorboard"] = "tensorboard"


class MLflow(SpecModel):
    """A run of MLflow: on the server that the service names (`MLFLOW_TRACKING_URI`), else in a folder."""

    type: Literal["mlflow"] = "mlflow"
    experiment: Label = "eft"
    """Experiment that the run belongs to; made where it is not there."""


class WandB(SpecModel):
    """A run of Weights & Biases: uploaded if the service has a key (`WANDB_API_KEY`), else kept offline in a folder for
    `wandb sync`."""

    type: Literal["wandb"] = "wandb"
    project: Label = "eft"
    """Project of Weights & Biases that the run belongs to."""


def _is_free(project: str) -> str:
    if project.lower().startswith(RESERVED_BEGINNING) or project.lower().endswith(RESERVED_ENDS):
        raise ValueError(
            f"trackio keeps names that begin with {RESERVED_BEGINNING} or end with one of {', '.join(RESERVED_ENDS)} "
            "for files of its own"
        )
    return project


class Trackio(SpecModel):
    """A run of trackio, in the folder `trackio` of the service's tracking folder."""

    type: Literal["trackio"] = "trackio"
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"), AfterValidator(_is_free)] = "eft"
    """Project of trackio that the run belongs to."""


Tracker = Annotated[TensorBoard | MLflow | WandB | Trackio, Field(discriminator="type"), short_form(by_type)]


def _once(trackers: list[Tracker]) -> list[Tracker]:
    if len({one.type for one in trackers}) < len(trackers):
        raise ValueError("each tracker may occur only once")
    return trackers


Tracking = Annotated[list[Tracker], AfterValidator(_once), short_form(lambda value: [value], "tensorboard")]
"""What is shown the job's curves."""
