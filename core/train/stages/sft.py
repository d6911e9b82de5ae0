"""Supervised fine-tuning: cross-entropy on the labelled tokens, and its evaluation on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from core.train.batch import IGNORE_INDEX, Batch
from core.train.engine import Diverged, Engine, Loss, LossFunction
from core.train.logits import label_hidden, label_logits
from core.train.loss.head import Head, head_of
from core.train.loss.linear_cross_entropy import linear_cross_entropy

WHOLE_LOGITS_BYTES = 256 * 2**20
"""Float32 logits of a batch up to which a trained head runs on all label tokens at once."""


def sft_loss(model: nn.Module, batch: Batch) -> Loss:
    """Sum of -log p over the labelled tokens of the batch, in float32, from whole logits of these tokens."""
    logits, targets = label_logits(model, batch)
    return Loss(functional.cross_entropy(logits.float(), targets, reduction="sum"), batch.label_tokens)


def chunked_sft_loss(head: Head) -> LossFunction:
    """The same sum with head and cross-entropy in one, chunk by chunk: never whole logits."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        hidden, targets = label_hidden(head, batch)
        total = linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, options=head.options)
        return Loss(total, batch.label_tokens)

    return loss


def choose_sft_loss(engine: Engine) -> tuple[LossFunction, dict[str, Any]]:
    """The loss of a run and what the run record says of it. Chunked, where the head is frozen and of the known form:
    it needs less memory and no more time. A trained head costs the chunked form a sum of its own gradient over the
    chunks, so that it is taken only where the logits are large; the choice is a batch's own, by its label tokens."""
    with engine.inference() as model:
        head = head_of(model)
    if isinstance(head, str):
        return sft_loss, {"kernel": "logits", "reason": head}
    chunked = chunked_sft_loss(head)
    if not head.weight.requires_grad:
        return chunked, {"kernel": "chunked"}

    def by_size(model: nn.Module, batch: Batch) -> Loss:
        small = batch.label_tokens * vocabulary * 4 <= WHOLE_LOGITS_BYTES
        return sft_loss(model, batch) if small else chunked(model, batch)

    vocabulary = head.weight.shape[0]
    return by_size, {"kernel": "by size", "chunked_above_tokens": WHOLE_LOGITS_BYTES // (4 * vocabulary)}


def evaluate(
    engine: Engine, batches: Iterable[Batch], *, exact_match: bool, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Held-out figures; the training state is left alone. `between` runs before each batch and may raise to stop.

    eval_loss: mean over all labelled tokens. eval_perplexity: its exponential. eval_exact_match: share of rows whose
    every labelled token is the most likely one given the row so far. For a row with one completion that is exactly
    the share that greedy decoding would write token for token, its end token included.
    """
    total, tokens, matched, rows = 0.0, 0, 0, 0
    for batch in batches:
        between()
        with engine.inference() as model:
            moved = batch.to(engine.device)
            logits, targets = label_logits(model, moved)
            total += float(functional.cross_entropy(logits.float(), targets, reduction="sum"))
            right = logits.argmax(dim=-1) == targets
        counts = (moved.labels[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
        matched += sum(bool(part.all()) for part in torch.split(right, counts))
        tokens += batch.label_tokens
        rows += len(batch.lengths)
    loss = total / tokens
    if not math.isfinite(loss):
        raise Diverged(f"the held-out loss is {loss} after step {engine.steps}", field="optimizer.learning_rate")
    values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
    if exact_match:
        values["eval_exact_match"] = matched / rows
    return values
