"""Supervised fine-tuning: cross-entropy on the labelled tokens, and its evaluation on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

from core.train.batch import IGNORE_INDEX, Batch
from core.train.engine import Diverged, Engine, Loss
from core.train.logits import label_logits


def sft_loss(model: nn.Module, batch: Batch) -> Loss:
    """Sum of -log p over the labelled tokens of the batch, in float32."""
    logits, targets = label_logits(model, batch)
    return Loss(functional.cross_entropy(logits.float(), targets, reduction="sum"), batch.label_tokens)


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
