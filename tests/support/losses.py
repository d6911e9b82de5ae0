"""The loss of supervised fine-tuning as tests of the engine take it: a plain sum, from the model's own logits."""

from __future__ import annotations

from torch.nn import functional

from core.train.batch import Batch
from core.train.engine import Engine
from core.train.logits import label_logits
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from core.train.stages.sft import SupervisedFineTuning

UNDIVIDED = {"label_tokens": 1}


def whole_logits_loss(policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
    """Sum of -log p over the labels, from whole logits."""
    logits, targets = label_logits(policy.model, batch)
    total = functional.cross_entropy(logits.float(), targets, reduction="sum")
    return Loss(total, {"loss": total.detach().double()})


def summed(engine: Engine, batch: Batch) -> Loss:
    """Sum of -log p over the labels, in training mode, from whole logits."""
    return engine.forward(batch, whole_logits_loss, UNDIVIDED)


def by_kernels(engine: Engine, batch: Batch, divisor: int = 1) -> Loss:
    """The loss by the kernels that a run takes, divided."""
    return engine.forward(batch, SupervisedFineTuning().loss, {"label_tokens": divisor})
