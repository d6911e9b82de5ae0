"""Continued pre-training: cross-entropy on every token of raw text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals

LARGEST = 700.0
"""A loss beyond this has no perplexity in float64."""


class ContinuedPreTraining(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over all tokens of a step, which are all labels."""

    name = "cpt"
    title = "Continued pre-training"
    loss_unit = "tokens"
    held_out_metrics: Mapping[str, Literal["lower", "higher"]] = {"eval_loss": "lower", "eval_perplexity": "lower"}

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"label_tokens": sum(labels)}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        items = totals["label_tokens"]
        total = policy.cross_entropy(batch, items)
        return Loss(total / items, {"loss": total.detach().double()})

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        loss = sums["loss"] / totals["label_tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST))}

    def evaluate(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Mapping[str, float]:
        return {"loss": float(policy.figures(batch).losses.double().sum())}
