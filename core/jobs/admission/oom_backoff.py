"""Out of memory: the same run in smaller pieces.

A micro-batch (of rows, or of tokens) is cut into equal parts and accumulation raised by as much, so that every
optimizer step still sees the same rows; the spec stays as it was submitted, the changed fields stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.plan.steps import BATCH, micro_batch
from core.spec.axes.batching import Rows
from core.spec.axes.runtime import HeldOut, NoSamples
from core.spec.job import JobSpec

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

    The micro-batch becomes its largest divisor below itself: half where it is even. One of tokens is not cut below
    max_length, since a row is never cut. A pass over held-out rows has no more tokens than one of training
    (core/plan/memory/), so that more rows than that has count for nothing.
    """
    if field == BATCH:
        batch, name, least = micro_batch(spec)
        accumulation = spec.training.gradient_accumulation_steps
        parts = _least_factor(batch)
        if parts is None or batch // parts < least or accumulation * parts > MAX_ACCUMULATION:
            return None
        return {name: batch // parts, ACCUMULATION: accumulation * parts}
    if field == EVAL_BATCH and isinstance(spec.evaluation, HeldOut):
        rows = spec.evaluation.per_device_eval_batch_size
        if isinstance(spec.batching, Rows) and isinstance(spec.evaluation.samples, NoSamples):
            rows = min(rows, spec.training.per_device_train_batch_size)
        return {EVAL_BATCH: rows // 2} if rows > 1 else None
    return None


def words(changes: Mapping[str, int]) -> str:
    return " and ".join(f"{path} = {value}" for path, value in changes.items())


def _least_factor(number: int) -> int | None:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), None)
