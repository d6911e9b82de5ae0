"""A stage of a mixture-of-experts model: its loss, and that of balance between the experts (core/train/loss/router.py).

loss + coefficient · (mean of the balance over the sequences of a step)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from core.errors import Fault, SpecError
from core.train.batch import Batch
from core.train.loss.router import RouterBalance, add_balance, coefficient_of
from core.train.policy import PolicyModel
from core.train.run import Run
from core.train.stage import Loss, Stage, Totals


class Balanced(Stage):
    """A Stage (core/train/stage.py) around another."""

    def __init__(self, stage: Stage, balance: RouterBalance, coefficient: float, *, sequences: int) -> None:
        """`sequences`: those of each example that are in the batches of training."""
        self.inner, self.balance, self.coefficient, self.sequences = stage, balance, coefficient, sequences
        self.name, self.title, self.loss_unit, self.head = stage.name, stage.title, stage.loss_unit, stage.head
        self.reference, self.dropout, self.prelude_sequences = stage.reference, stage.dropout, stage.prelude_sequences
        self.held_out_metrics = stage.held_out_metrics

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {**self.inner.shares(lengths, labels), "sequences": self.sequences}

    def prelude(self, policy: PolicyModel, batch: Batch) -> Mapping[str, Tensor]:
        return self.inner.prelude(policy, batch)

    def totals(self, sums: Mapping[str, float], totals: Totals) -> Totals:
        return self.inner.totals(sums, totals)

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        with self.balance.watching(batch) as watched:
            found = self.inner.loss(policy, batch, totals)
        total = add_balance(found.total, watched, self.coefficient / totals["sequences"])
        return Loss(total, {**found.sums, "aux_loss": watched.balance().double()})

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        aux_loss = sums["aux_loss"] / totals["sequences"]
        found = self.inner.figures(sums, totals)
        return found | {"loss": found["loss"] + self.coefficient * aux_loss, "aux_loss": aux_loss}

    def remark(self, figures: Mapping[str, float]) -> Fault | None:
        return self.inner.remark(figures)

    def evaluate(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Mapping[str, float]:
        with self.balance.watching(batch) as watched:
            sums = self.inner.evaluate(policy, batch, totals)
        return {**sums, "aux_loss": float(watched.balance())}

    def held_out_figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        aux_loss = sums["aux_loss"] / totals["sequences"]
        found = self.inner.held_out_figures(sums, totals)
        loss = found["eval_loss"] + self.coefficient * aux_loss
        return found | {"eval_loss": loss, "eval_aux_loss": aux_loss}


def with_balance(run: Run, stage: Stage, model: nn.Module, sequences: int) -> tuple[Stage, dict[str, Any]]:
    """The stage with the loss of balance that the job or the model's configuration asks for, and entries of the run
    record. `sequences`: as Balanced has it. SpecError where the job asks for one that the model cannot have."""
    wanted = run.spec.training.router_aux_loss_coef
    own = coefficient_of(model.config)
    coefficient = own if wanted is None else wanted
    if not coefficient:
        return stage, {} if own is None else {"router_loss": {"coefficient": 0.0}}
    try:
        balance = RouterBalance(model)
    except ValueError as error:
        if wanted is not None:
            words = f"the model has no load-balancing loss: {error}; remove `training.router_aux_loss_coef`"
            raise SpecError(words, field="training.router_aux_loss_coef") from error
        run.notice("no_router_loss", f"trained without the load-balancing loss of the model's configuration: {error}")
        return stage, {"router_loss": {"coefficient": 0.0, "why": str(error)}}
    found = Balanced(stage, balance, coefficient, sequences=sequences)
    return found, {"router_loss": {"coefficient": coefficient}}
