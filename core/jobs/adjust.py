"""Out of memory: the same run in smaller pieces.

A micro-batch is cut into equal parts and accumulation raised by as much, so that every optimizer step still sees the
same rows; the spec stays as it was submitted, the changed fields stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.spec.job import JobSpec
from core.spec.runtime import HeldOut

BATCH = "training.per_device_train_batch_size"
ACCUMULATION = "training.gradient_accumulation_steps"
EVAL_BATCH = "evaluation.per_device_eval_batch_size"
MAX_ACCUMULATION = 4096
"""What the spec allows."""


def apply(spec: JobSpec, adjusted: Mapping[str, int]) -> JobSpec:
    """The spec with the changed fields in it."""
    if not adjusted:
        return spec
    values = spec.model_dump(mode="json")
    for path, value in adjusted.items():
        axis, name = path.split(".")
        values[axis][name] = value
    return JobSpec.model_validate(values)


def smaller(spec: JobSpec, field: str | None) -> dict[str, int] | None:
    """Changes that need about half the memory for what `field` names, or None where there is nothing left to halve.

    The micro-batch becomes its largest divisor below itself: half where it is even.
    """
    if field == BATCH:
        batch, accumulation = spec.training.per_device_train_batch_size, spec.training.gradient_accumulation_steps
        parts = _least_factor(batch)
        if parts is None or accumulation * parts > MAX_ACCUMULATION:
            return None
        return {BATCH: batch // parts, ACCUMULATION: accumulation * parts}
    if field == EVAL_BATCH and isinstance(spec.evaluation, HeldOut):
        rows = spec.evaluation.per_device_eval_batch_size
        return {EVAL_BATCH: rows // 2} if rows > 1 else None
    return None


def words(changes: Mapping[str, int]) -> str:
    return " and ".join(f"{path} = {value}" for path, value in changes.items())


def _least_factor(number: int) -> int | None:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), None)
