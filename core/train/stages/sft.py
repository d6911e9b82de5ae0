"""Supervised fine-tuning: cross-entropy on the labelled tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from core.plan.constants import WHOLE_LOGITS_BYTES
from core.train.batch import Batch
from core.train.engine import Engine, Loss, LossFunction
from core.train.logits import label_hidden, label_logits
from core.train.loss.chunk import loss_backend
from core.train.loss.head import OutputHead
from core.train.loss.linear_cross_entropy import linear_cross_entropy


def sft_loss(model: nn.Module, batch: Batch, upstream: float = 1.0) -> Loss:
    """Sum of -log p over the labelled tokens of the batch, in float32, from whole logits of these tokens."""
    logits, targets = label_logits(model, batch)
    return Loss(functional.cross_entropy(logits.float(), targets, reduction="sum"), batch.label_tokens)


def chunked_sft_loss(head: OutputHead) -> LossFunction:
    """The same sum with head and cross-entropy in one, chunk by chunk: never whole logits."""

    def loss(model: nn.Module, batch: Batch, upstream: float = 1.0) -> Loss:
        hidden, targets = label_hidden(head, batch)
        total = linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, options=head.options, upstream=upstream
        )
        return Loss(total, batch.label_tokens)

    return loss


def choose_sft_loss(engine: Engine, veto: str | None = None) -> tuple[LossFunction, dict[str, Any]]:
    """The loss of a run and what the run record says of it; `veto`: why it may not be the chunked one.

    Chunked, where the head is frozen and of the known form: it needs less memory and no more time. A trained head costs
    the chunked form a sum of its own gradient over the chunks, so that it is taken only where the logits are large; the
    choice is a batch's own, by its label tokens."""
    head = engine.head(veto)
    if isinstance(head, str):
        return sft_loss, {"kernel": "logits", "reason": head}
    if head.bias is not None and head.bias.requires_grad:
        return sft_loss, {"kernel": "logits", "reason": "the output head's bias is trained"}
    chunked = chunked_sft_loss(head)
    dtype = engine.autocast or head.weight.dtype
    backend = loss_backend(head.weight.device, dtype, head.bias, head.options)
    if not head.weight.requires_grad:
        return chunked, {"kernel": "chunked", "backend": backend}

    def by_size(model: nn.Module, batch: Batch, upstream: float = 1.0) -> Loss:
        small = batch.label_tokens * vocabulary * 4 <= WHOLE_LOGITS_BYTES
        return sft_loss(model, batch, upstream) if small else chunked(model, batch, upstream)

    vocabulary = head.weight.shape[0]
    above = WHOLE_LOGITS_BYTES // (4 * vocabulary)
    return by_size, {"kernel": "by size", "backend": backend, "chunked_above_tokens": above}


def whole_logits(reason: str, model: nn.Module) -> str:
    """What to tell of a run without the chunked loss."""
    vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    return (
        f"logits are made whole, for {reason}: about {12 * vocabulary:,} bytes a label token in training, and up "
        "to that in evaluations"
    )
