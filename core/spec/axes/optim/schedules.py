"""Arms of the schedule axis: the learning rate over time. Names and formulas are those of transformers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from core.spec.base import SpecModel

Rate = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=0, le=100_000_000)]


def _one_of(written: Any, share: str, count: str) -> Any:
    """Drop the default of `share` where `count` is given. ValueError where both are given."""
    if not isinstance(written, dict) or written.get(count) is None:
        return written
    if written.get(share) is not None:
        raise ValueError(f"`{share}` and `{count}` say the same thing twice: remove one of them")
    return {**written, share: None}


class Warmup(SpecModel):
    """Common fields of schedules with a warm-up; not an arm."""

    type: str
    warmup_ratio: Rate | None = 0.03
    """Share of all optimizer steps used for warm-up, rounded up. Null with `warmup_steps`."""
    warmup_steps: Steps | None = None
    """Optimizer steps used for warm-up, in place of `warmup_ratio`."""

    @model_validator(mode="before")
    @classmethod
    def _one_warmup(cls, written: Any) -> Any:
        return _one_of(written, "warmup_ratio", "warmup_steps")

    @model_validator(mode="after")
    def _has_a_warmup(self) -> Warmup:
        if self.warmup_ratio is None and self.warmup_steps is None:
            raise ValueError("`warmup_ratio` is null and `warmup_steps` is not given: set one of them (0: no warm-up)")
        return self


class Linear(Warmup):
    """Warm-up, then linear decay to zero at the last step."""

    type: Literal["linear"] = "linear"


class Cosine(Warmup):
    """Warm-up, then cosine decay to zero at the last step (arXiv:1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"


class CosineWithRestarts(Warmup):
    """Warm-up, then `num_cycles` cosine decays to zero, each from the peak (arXiv:1608.03983)."""

    type: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    num_cycles: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of decays; 1 is `cosine`."""


class CosineWithMinLR(Warmup):
    """Warm-up, then cosine decay to `min_lr_rate` of the peak."""

    type: Literal["cosine_with_min_lr"] = "cosine_with_min_lr"
    min_lr_rate: Rate = 0.1
    """Final learning rate as a share of the peak."""


class CosineWarmupWithMinLR(Warmup):
    """As `cosine_with_min_lr`, with a warm-up that begins above zero and a decay that reaches its end at the last
    step."""

    type: Literal["cosine_warmup_with_min_lr"] = "cosine_warmup_with_min_lr"
    min_lr_rate: Rate = 0.1
    """Final learning rate as a share of the peak."""
    warmup_lr_rate: Rate | None = None
    """Learning rate of the first step as a share of the peak. Null: one step of the warm-up."""


class Polynomial(Warmup):
    """Warm-up, then decay to `min_lr_rate` of the peak with the remaining share of steps to a power."""

    type: Literal["polynomial"] = "polynomial"
    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Exponent; 1 is linear."""
    min_lr_rate: Rate = 0.0
    """Final learning rate as a share of the peak."""


class Constant(SpecModel):
    """The peak learning rate in every step."""

    type: Literal["constant"] = "constant"


class ConstantWithWarmup(Warmup):
    """Warm-up, then the peak learning rate."""

    type: Literal["constant_with_warmup"] = "constant_with_warmup"


class InverseSqrt(Warmup):
    """Warm-up, then decay with the inverse square root of the step."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Steps after the warm-up in which the learning rate falls to 0.71 of the peak. Default: the steps of the warm-up,
    or 10 000 without one."""


class WarmupStableDecay(Warmup):
    """Warm-up, the peak learning rate, then a decay to `min_lr_rate` of the peak over the last steps (WSD,
    arXiv:2404.06395)."""

    type: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = 0.2
    """Share of all optimizer steps used for the decay, rounded up. Null with `decay_steps`. The decay is shortened
    where the warm-up leaves fewer steps."""
    decay_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps used for the decay, in place of `decay_ratio`."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    """Shape of the decay; `1-sqrt` is one minus the square root of the decay's progress."""
    min_lr_rate: Rate = 0.0
    """Final learning rate, and that of the first step, as a share of the peak."""

    @model_validator(mode="before")
    @classmethod
    def _one_decay(cls, written: Any) -> Any:
        return _one_of(written, "decay_ratio", "decay_steps")

    @model_validator(mode="after")
    def _has_a_decay(self) -> WarmupStableDecay:
        if self.decay_ratio is None and self.decay_steps is None:
            raise ValueError("`decay_ratio` is null and `decay_steps` is not given: set one of them")
        return self


class ReduceLROnPlateau(Warmup):
    """Warm-up, then the peak learning rate, multiplied by `factor` whenever `evaluation.metric_for_best_model` has not
    improved for more than `patience` evaluations in a row. The evaluation of the untrained model does not count."""

    type: Literal["reduce_lr_on_plateau"] = "reduce_lr_on_plateau"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of a reduction."""
    patience: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Evaluations without improvement that are tolerated."""
    threshold: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """Least improvement that counts, as a share of the best value."""
    cooldown: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Evaluations after a reduction that do not count as bad."""
    min_lr_rate: Rate = 0.0
    """Lower bound of the learning rate as a share of the peak."""


class GreedyLR(Warmup):
    """Warm-up, then a learning rate that rises by 1 / `factor` after more than `patience` improving evaluations in a
    row and falls by `factor` after as many that did not improve (arXiv:2512.14527). It is measured by
    `evaluation.metric_for_best_model`; the evaluation of the untrained model does not count."""

    type: Literal["greedy"] = "greedy"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Factor of a reduction; a rise divides by it."""
    patience: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Evaluations in a row that change nothing yet."""
    threshold: Annotated[float, Field(ge=0, le=1e9)] = 1e-6
    """Least improvement that counts, in units of the metric."""
    cooldown: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Evaluations after a reduction that do not count."""
    rise_cooldown: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Evaluations after a rise that do not count."""
    min_lr_rate: Rate = 0.1
    """Lower bound of the learning rate as a share of the peak."""
    max_lr_rate: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Upper bound of the learning rate as a multiple of the peak."""
    reset_after: Annotated[int, Field(ge=1, le=1_000_000)] = 500
    """Reductions in a row at the lower bound after which the schedule starts again from the peak."""


Steady = (
    Linear
    | Cosine
    | CosineWithRestarts
    | CosineWithMinLR
    | CosineWarmupWithMinLR
    | Polynomial
    | Constant
    | ConstantWithWarmup
    | InverseSqrt
    | WarmupStableDecay
)
"""Schedules of the step alone."""
Adaptive = ReduceLROnPlateau | GreedyLR
"""Schedules of the step and of the evaluations so far."""
