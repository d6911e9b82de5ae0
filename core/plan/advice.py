"""Warnings about a job that is valid and yet hardly what its owner wants: too few steps, a learning rate of another
method, a loss that rose. Pure. Plan and submit give those that are known there. The trainer gives the one about the
loss, and those about steps where it was started by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import Fault
from core.plan.steps import micro_batch, step_size, warmup_steps
from core.spec.axes.batching import Rows
from core.spec.axes.optim.schedules import Warmup
from core.spec.job import JobSpec
from core.spec.resolve import default_rates

FEW_STEPS = 20
"""Optimizer steps; a run with fewer hardly learns anything."""
FAR_RATE = 5.0
"""Factor between a learning rate and the default of its method from which on it is taken for another method's rate."""
FAR_WORSE = 2.0
"""Factor by which the held-out loss must rise for a warning."""
ROSE_STEPS = 5
"""Steps over which training losses are averaged before they are compared."""
ROSE_TIMES, ROSE_BY = 2.0, 1.0
"""Factor and difference by which the training loss must rise for a warning, both."""
GUESSED = 10.0
"""About the loss of a model that guesses among all tokens alike."""


def of_steps(spec: JobSpec, total: int, *, estimated: bool = False) -> list[Fault]:
    """Warnings about a run of so many optimizer steps."""
    found, about = [], "about " if estimated else ""
    if total < FEW_STEPS:
        _, field, _ = micro_batch(spec)
        if spec.training.max_steps is not None and spec.training.max_steps <= total:
            why, out = f"`training.max_steps` is {spec.training.max_steps}", "raise it"
        else:
            why = f"the rows are few for steps of this size ({_step(spec)})"
            out = f"lower `{field}` or `training.gradient_accumulation_steps`, or raise `training.num_train_epochs`"
        found.append(
            Fault(
                "few_steps",
                f"the run has {about}{total} optimizer step{'' if total == 1 else 's'}, too few to learn much: {why}; "
                f"{out}",
                field if spec.training.max_steps is None else "training.max_steps",
            )
        )
    warmup = warmup_steps(total, spec.schedule)
    if 2 * warmup > total:
        in_steps = isinstance(spec.schedule, Warmup) and spec.schedule.warmup_steps is not None
        field = "schedule.warmup_steps" if in_steps else "schedule.warmup_ratio"
        found.append(
            Fault(
                "long_warmup",
                f"{warmup} of {total} optimizer steps are warm-up, in which the learning rate still rises; lower "
                f"`{field}`, or give the run more steps",
                field,
            )
        )
    return found


def _step(spec: JobSpec) -> str:
    return f"{step_size(spec)} rows" if isinstance(spec.batching, Rows) else f"up to {step_size(spec)} tokens"


def of_rate(spec: JobSpec, method: str, where: str) -> Fault | None:
    """A warning where `method: auto` chose adapters and the job's own learning rate is one of all weights (for the
    other case core/plan/candidates.py leaves full fine-tuning out). `method`: its type. `where`: words for the slot."""
    rate, (adapters, full) = spec.optimizer.learning_rate, default_rates(spec)
    if rate is None or method == "full" or full == adapters or rate > adapters / FAR_RATE:
        return None
    return Fault(
        "learning_rate_of_another_method",
        f"`method: auto` chooses `{method}`{where}, and `optimizer.learning_rate` is {rate:g}, where the default of "
        f"that method is {adapters:g}; leave the learning rate out, or name the method",
        "optimizer.learning_rate",
    )


def of_losses(before: float | None, after: float | None) -> Fault | None:
    """A warning where the held-out loss rose far between the start and the end."""
    if before is None or after is None or after <= FAR_WORSE * before:
        return None
    return Fault(
        "loss_rose",
        f"the held-out loss rose from {before:.4g} to {after:.4g}: the model is far worse than before training; lower "
        "`optimizer.learning_rate`",
        "optimizer.learning_rate",
    )


def of_training_losses(metrics: Sequence[Mapping[str, float]]) -> Fault | None:
    """A warning where the training loss of the last steps is far above that of the first ones, though it is a finite
    number. `metrics`: those of each step so far; a step without a loss is left out."""
    if len(metrics) < 2 * ROSE_STEPS:
        return None
    losses = [[one["loss"] for one in part if "loss" in one] for part in (metrics[:ROSE_STEPS], metrics[-ROSE_STEPS:])]
    if not all(losses):
        return None
    first, last = (sum(part) / len(part) for part in losses)
    first = min(first, max(losses[0][0], GUESSED))  # where it exploded within the first steps
    if last <= max(ROSE_TIMES * first, first + ROSE_BY):
        return None
    return Fault(
        "training_loss_rose",
        f"the training loss rose from {first:.4g} to {last:.4g} (means of {ROSE_STEPS} steps): the model unlearns; "
        "cancel the job, and lower `optimizer.learning_rate` or lengthen the warm-up",
        "optimizer.learning_rate",
    )
