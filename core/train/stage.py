"""What a stage is to the rest of the trainer. One file a stage (core/train/stages); no other part knows which one runs.

A stage answers sums. Training divides them by totals that every rank knows before the first batch of a step, since they
follow from counts alone; so a step's update does not depend on how the step is cut into batches, and the figures of a
step, of an evaluation and of several ranks add up in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from core.train.batch import Batch
from core.train.policy import PolicyModel

Totals = Mapping[str, int]
"""Divisors of a step's loss, by their name: the label tokens of all ranks, say."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A stage's loss on one batch."""

    total: Tensor
    """Scalar with gradient, already divided: the totals of a step's batches add up to the step's loss."""
    sums: Mapping[str, Tensor]
    """Float64 sums over the batch, on the device; they add up over batches and ranks. `loss` is always among them: a
    step is skipped, and a run has diverged, where it is no finite number."""


class LossFunction(Protocol):
    def __call__(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        """Compute the loss of a batch of a step with these totals."""
        ...


class Stage(Protocol):
    """See the module."""

    name: str
    title: str
    """Name of the stage in model cards."""
    loss_unit: str
    """What the loss is a mean over, for people."""

    @property
    def held_out_metrics(self) -> Mapping[str, Literal["lower", "higher"]]:
        """Figures of an evaluation by which the best one may be chosen, and which way is better."""
        ...

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Totals:
        """Compute what a row adds to the totals of its step. `lengths`, `labels`: tokens and label tokens of each of
        the row's sequences."""
        ...

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        """Compute the loss of a batch; a LossFunction."""
        ...

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """Compute a step's figures from the sums over all of its batches; `loss` is the first of them."""
        ...

    def evaluate(self, policy: PolicyModel, batch: Batch) -> Mapping[str, float]:
        """Compute sums over a batch of held-out rows, without gradients."""
        ...

    def held_out_figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute an evaluation's figures from the sums over all held-out rows; `eval_loss` is the first of them."""
        ...
