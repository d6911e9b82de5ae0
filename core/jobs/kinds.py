"""The kinds of child processes and the kinds of slots that they run on: one table of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from core.settings import Settings


class Kind(StrEnum):
    """What one attempt at a job does, and what a waiting job waits for a slot to do."""

    PREPARE = "prepare"
    """Bring the model and the datasets of the hub to the data root."""
    TRAIN = "train"
    PREVIEW = "preview"
    """Render the rows of a file as a training would."""
    SESSION = "session"
    """Answer operations of a training loop that runs elsewhere."""
    SERVING = "serving"
    """Answer requests to a model, of the lowest priority."""
    TRIAL = "trial"
    """Reward answers of the untrained model as a training would."""
    EXPORT = "export"
    """Make formats of a model that was trained before."""


SlotKind = Literal["gpu", "cpu", "prepare", "preview", "export"]


@dataclass(frozen=True, slots=True)
class ChildKind:
    """What the worker and the queue know of one kind of child."""

    module: str
    """Module that the child runs, `python -m MODULE RUN_DIR`."""
    silence: Callable[[str, Settings], float | None]
    """Seconds without an event after which it hangs, by the phase that it reported last; None: no bound."""
    network: bool = False
    """Whether it may use the network, and gets the hub's token for it."""
    standby: bool = False
    """Whether a prewarmed trainer may become it."""
    takes: Kind | None = None
    """Kind whose slots it takes; None: slots of its own."""
    stream: bool = False
    """Whether it is given one end of a socket pair."""
    billed: bool = False
    """Whether its time counts in fair share."""
    limited: bool = False
    """Whether `resources.max_runtime_seconds` bounds its time."""


@dataclass(frozen=True, slots=True)
class SlotType:
    """What one kind of slot is for."""

    serves: Kind
    billing: float = 0.0
    """What one second on it counts in fair share. On a box without GPUs all slots count alike."""


def _silence_of_preparing(phase: str, settings: Settings) -> float | None:
    # A child that waits for a model's lock waits for another child, which has a worker that looks after it.
    return None if phase == "waiting" else settings.hang_seconds_preparing


def _silence_of_training(phase: str, settings: Settings) -> float:
    return settings.hang_seconds_training if phase in ("training", "serving") else settings.hang_seconds_loading


CHILDREN: Mapping[Kind, ChildKind] = {
    Kind.PREPARE: ChildKind("core.train.entry.prepare", network=True, silence=_silence_of_preparing),
    Kind.TRAIN: ChildKind("core.train", standby=True, billed=True, limited=True, silence=_silence_of_training),
    Kind.TRIAL: ChildKind(
        "core.train", takes=Kind.TRAIN, standby=True, billed=True, limited=True, silence=_silence_of_training
    ),
    Kind.PREVIEW: ChildKind("core.train.entry.preview", silence=_silence_of_training),
    Kind.SESSION: ChildKind(
        "core.train.session", takes=Kind.TRAIN, stream=True, billed=True, limited=True, silence=_silence_of_training
    ),
    Kind.SERVING: ChildKind(
        "core.train.serving", takes=Kind.TRAIN, stream=True, billed=True, limited=True, silence=_silence_of_training
    ),
    Kind.EXPORT: ChildKind("core.train.entry.export", limited=True, silence=_silence_of_training),
}

WAITING_KINDS = (Kind.TRAIN, Kind.SESSION, Kind.SERVING, Kind.TRIAL)
"""Kinds of jobs that wait for their model, and then for a training slot."""
ON_TRAINING_SLOTS = tuple(kind for kind, child in CHILDREN.items() if Kind.TRAIN in (kind, child.takes))
"""Kinds that hold a GPU, or the CPU of a box without one."""

SLOTS: Mapping[SlotKind, SlotType] = {
    "gpu": SlotType(Kind.TRAIN, billing=1.0),
    "cpu": SlotType(Kind.TRAIN, billing=0.1),
    "prepare": SlotType(Kind.PREPARE),
    "preview": SlotType(Kind.PREVIEW),
    "export": SlotType(Kind.EXPORT),
}
"""`preview` serves both halves of a preview, so that it waits neither for a download nor for a training; `export` does
the same for an export."""
