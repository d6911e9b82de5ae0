"""The axes of a job, the values of each, and where a job stands on them. An axis takes its values from the spec's
arms, so a new arm appears here by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from core.spec.axes.batching import Batching, Packed, Rows, Tokens
from core.spec.axes.data import FORMATS, Data, format_of
from core.spec.axes.export import Merged
from core.spec.axes.model import JobModel
from core.spec.axes.runtime import Evaluation, HeldOut, Resident, SingleDevice
from core.spec.axes.stage import loss_on
from core.spec.axes.training import Training
from core.spec.job import JobSpec


def arms(annotation: Any) -> tuple[str, ...]:
    """Discriminators of an axis, in the order of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation.model_fields["type"].default,)
    return tuple(arm for part in get_args(annotation) for arm in arms(part))


def _field(name: str) -> tuple[str, ...]:
    return arms(JobSpec.model_fields[name].annotation)


def _batching(batching: Batching) -> str:
    return "rows by length" if isinstance(batching, Rows) and batching.group_by_length else batching.type


AXES: dict[str, tuple[str, ...]] = {
    "stage": _field("stage"),
    "loss on": ("default", "completions", "last", "turns", "all"),
    "adapter": ("new", "continue", "merge"),
    "method": _field("method"),
    "quantization": ("default", *_field("quantization")),
    "merged": ("no", "yes"),
    "optimizer": _field("optimizer"),
    "schedule": _field("schedule"),
    "batching": tuple(_batching(arm) for arm in (Rows(), Rows(group_by_length=True), Tokens(), Packed())),
    "truncation": get_args(Training.model_fields["truncation"].annotation),
    "streaming": ("no", "yes"),
    "noise": ("no", "yes"),
    "precision": get_args(Training.model_fields["precision"].annotation),
    "compile": ("no", "yes"),
    "memory": _field("memory"),
    "checkpointing": ("default", "no", "yes", "selective"),
    "activation offloading": arms(Resident.model_fields["activation_offloading"].annotation),
    "stream": arms(Resident.model_fields["stream"].annotation),
    "offload optimizer": arms(Resident.model_fields["offload_optimizer"].annotation),
    "strategy": _field("resources"),
    "ranks": ("one", "several"),
    "accelerator": get_args(SingleDevice.model_fields["accelerator"].annotation),
    "train rows": ("auto", *FORMATS),
    "eval rows": ("absent", "auto", *FORMATS),
    "evaluation": ("default", *_field("evaluation"), "held_out in steps"),
}
"""Every axis and its values. `auto` rows are in a file that only the worker can read; it checks again."""

Values = Mapping[str, str]


def values_of(spec: JobSpec) -> dict[str, str]:
    """Where a job stands on every axis."""
    return {
        "stage": spec.stage.type,
        "loss on": loss_on(spec.stage) or "default",
        "adapter": adapter_of(spec),
        "method": spec.method.type,
        "quantization": spec.quantization.type if spec.quantization is not None else "default",
        "merged": "yes" if any(isinstance(item, Merged) for item in spec.export) else "no",
        "optimizer": spec.optimizer.type,
        "schedule": spec.schedule.type,
        "batching": _batching(spec.batching),
        "truncation": spec.training.truncation,
        "streaming": "yes" if spec.data.streaming else "no",
        "noise": "no" if spec.training.neftune_noise_alpha is None else "yes",
        "precision": spec.training.precision,
        "compile": "yes" if spec.training.compile else "no",
        "memory": spec.memory.type,
        "checkpointing": _checkpointing(spec.memory.gradient_checkpointing),
        "activation offloading": spec.memory.activation_offloading.type,
        "stream": spec.memory.stream.type,
        "offload optimizer": spec.memory.offload_optimizer.type,
        "strategy": spec.resources.type,
        "ranks": "one" if spec.resources.gpus == 1 else "several",
        "accelerator": spec.resources.accelerator,
        "train rows": format_of(spec.data.train),
        "eval rows": _eval_rows(spec.data),
        "evaluation": _evaluation(spec.evaluation),
    }


def adapter_of(spec: JobSpec) -> str:
    return (spec.model.adapter or "new") if isinstance(spec.model, JobModel) else "new"


def _checkpointing(said: bool | str | None) -> str:
    match said:
        case None:
            return "default"
        case bool():
            return "yes" if said else "no"
        case _:
            return said


def _evaluation(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "default"
    in_steps = isinstance(evaluation, HeldOut) and evaluation.eval_steps is not None
    return "held_out in steps" if in_steps else evaluation.type


def _eval_rows(data: Data) -> str:
    if data.split is not None:
        return format_of(data.train)
    return format_of(data.eval) if data.eval is not None else "absent"


def quoted(words: Iterable[str]) -> str:
    """Words as a list that a message shows."""
    return ", ".join(f"`{word}`" for word in words)
