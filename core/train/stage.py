"""What a stage is to the rest of the trainer. One file a stage (core/train/stages); no other part knows which one runs.

A stage answers sums. Training divides them by totals that every rank knows before the first batch of a step, since they
follow from counts alone; so a step's update does not depend on how the step is cut into batches, and the figures of a
step, of an evaluation and of several ranks add up in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from core.errors import Fault
from core.spec.axes.stage import Head
from core.train.batch import Batch
from core.train.policy import PolicyModel

Totals = Mapping[str, float]
"""Divisors of a step's loss, by their name: the label tokens of all ranks, say. With them, the numbers that a stage
computes before the step (`Stage.totals`)."""

MAXIMUM = "max/"
"""Prefix of the names of numbers that are joined by their maximum instead of their sum."""
N = TypeVar("N", float, Tensor)


def joined(name: str, one: N, other: N) -> N:
    """Join a number of two parts of a step: a sum, or a maximum where the name says so."""
    if not name.startswith(MAXIMUM):
        return one + other
    return torch.maximum(one, other) if isinstance(one, Tensor) else max(one, other)


def nothing(name: str) -> float:
    """Return the number of a part without examples."""
    return -math.inf if name.startswith(MAXIMUM) else 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A stage's loss on one batch."""

    total: Tensor
    """Scalar with gradient, already divided: the totals of a step's batches add up to the step's loss."""
    sums: Mapping[str, Tensor]
    """Float64 sums over the batch, on the device; they add up over batches and ranks. `loss` is always among them: a
    step is skipped, and a run has diverged, where it is no finite number. Numbers whose name begins with MAXIMUM are
    joined by their maximum instead."""
    totals: Totals = field(default_factory=dict)
    """What `Stage.totals` found with the batch, where that is the whole step and has the rows of `Stage.prelude`
    beside it."""


class LossFunction(Protocol):
    def __call__(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        """Compute the loss of a batch of a step with these totals."""
        ...


class Stage(Protocol):
    """See the module. A stage inherits from it what it does not say otherwise."""

    name: str
    title: str
    """Name of the stage in model cards."""
    loss_unit: str
    """What the loss is a mean over, for people."""
    head: Head = "tokens"
    """Output head of the model."""
    reference: bool = False
    """Whether batches have `values["reference"]` [examples, sequences]: the summed log-probability of each sequence's
    labels under the model that training starts from."""
    dropout: bool = True
    """Whether the model's own dropout is on in training."""
    prelude_sequences: tuple[int, ...] = ()
    """Places of the sequences of each example that `prelude` is given; none: it is not called."""
    continues: bool = False
    """Whether `loss` takes batches that have those sequences beside them (`Batch.beside`), and calls `prelude`."""

    held_out_metrics: Mapping[str, Literal["lower", "higher"]]
    """Figures of an evaluation by which the best one may be chosen, and which way is better."""

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        """Compute what an example adds to the totals of its step. `lengths`, `labels`: tokens and label tokens of each
        of its sequences."""
        ...

    def prelude(self, policy: PolicyModel, batch: Batch) -> Mapping[str, Tensor]:
        """Compute float64 sums over a batch, without gradients, before the first batch of a step."""
        return {}

    def totals(self, sums: Mapping[str, float], totals: Totals) -> Totals:
        """Compute what joins the totals of a step from the sums of `prelude` over all of its examples."""
        return {}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        """Compute the loss of a batch; a LossFunction."""
        ...

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """Compute a step's figures from the sums over all of its batches; `loss` is the first of them."""
        ...

    def remark(self, figures: Mapping[str, float]) -> Fault | None:
        """What people should be told of a step with these figures, as a notice."""
        return None

    def evaluate(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Mapping[str, float]:
        """Compute sums over a batch of held-out examples, without gradients. `totals`: those of all held-out examples
        as if they were one step."""
        sums = self.loss(policy, batch, totals).sums
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

    def held_out_figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """Compute an evaluation's figures from the sums over all held-out examples; `eval_loss` is the first of
        them."""
        return {f"eval_{name}": value for name, value in self.figures(sums, totals).items()}
