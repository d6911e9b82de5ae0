"""Arithmetic of optimizer steps: what one holds, how many there are, and how many of them are warm-up. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import assert_never

from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.optim.schedules import Constant, Warmup
from core.spec.axes.optimizer import Schedule
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.training import Training
from core.spec.job import JobSpec

BATCH = "training.per_device_train_batch_size"
TOKENS = "batching.tokens_per_batch"


def micro_batch(spec: JobSpec) -> tuple[int, str, int]:
    """Size of a micro-batch in rows or tokens, the field that says so, and the least it can be."""
    match spec.batching:
        case Rows():
            return spec.training.per_device_train_batch_size, BATCH, 1
        case Tokens(tokens_per_batch=tokens) | Packed(tokens_per_batch=tokens):
            return tokens, TOKENS, spec.training.max_length * spec.stage.sequences
        case _ as never:
            assert_never(never)


def micro_batches(spec: JobSpec) -> int:
    """Micro-batches of an optimizer step, on all ranks."""
    return spec.training.gradient_accumulation_steps * spec.resources.gpus


def step_size(spec: JobSpec) -> int:
    """Rows or tokens of an optimizer step at most, on all ranks. Rows of a stage that answers prompts are prompts."""
    size = micro_batch(spec)[0] * micro_batches(spec)
    if isinstance(spec.stage, RolloutStage):
        return max(1, size // spec.stage.num_generations)  # fewer answers than a group are refused (`no_whole_groups`)
    return size


def steps_for(count: float, size: int) -> int:
    """Steps of `size` rows or tokens that hold `count` of them; the last may be smaller."""
    return math.ceil(count / size)


def total_steps(epochs: float, max_steps: int | None, steps_of: Callable[[int], int]) -> int:
    """Optimizer steps of a run. `steps_of` answers the steps of each epoch by its number; a fraction of an epoch is
    rounded up."""
    if max_steps is not None:
        return max_steps
    whole = math.floor(epochs)
    begun = epochs - whole
    return sum(steps_of(epoch) for epoch in range(whole)) + (math.ceil(begun * steps_of(whole)) if begun else 0)


def run_steps(spec: JobSpec, steps_of: Callable[[int], int]) -> int:
    """Optimizer steps of a run. `steps_of` answers the steps that pass over the rows of each epoch, by its number; a
    stage that answers prompts takes `num_iterations` optimizer steps on the answers of each."""
    training = spec.training
    steps = total_steps(training.num_train_epochs, training.max_steps, steps_of)
    if isinstance(spec.stage, RolloutStage) and training.max_steps is None:
        return steps * spec.stage.num_iterations
    return steps


def estimated_steps(training: Training, tokens: int, size: int) -> int:
    """Optimizer steps of a run over rows of so many tokens, in steps of `size` tokens that are all but full."""
    return max(1, math.ceil(steps_for(tokens, size) * training.num_train_epochs))


def warmup_steps(total: int, schedule: Schedule) -> int:
    """Optimizer steps in which the learning rate rises; a ratio is rounded up as `TrainingArguments.get_warmup_steps`
    does it."""
    match schedule:
        case Constant():
            return 0
        case Warmup(warmup_steps=int(steps)):
            return steps
        case Warmup(warmup_ratio=float(ratio)):
            return math.ceil(total * ratio)
        case _:
            raise ValueError(f"`schedule: {schedule.type}` has no warm-up")
