"""Supervised fine-tuning: cross-entropy on the label tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class SupervisedFineTuning(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over all label tokens of a step."""

    name = "sft"
    title = "Supervised fine-tuning"
    loss_unit = "label tokens"

    def __init__(self, *, completions: bool = True) -> None:
        """`completions`: the labels are completions (or some of them), not all tokens of a row."""
        self.completions = completions
        metrics: dict[str, Literal["lower", "higher"]] = {"eval_loss": "lower", "eval_perplexity": "lower"}
        self.held_out_metrics = metrics | ({"eval_exact_match": "higher"} if completions else {})

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"label_tokens": sum(labels)}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        items = totals["label_tokens"]
        total = policy.cross_entropy(batch, items)
        return Loss(total / items, {"loss": total.detach().double()})

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        return {"loss": sums["loss"] / totals["label_tokens"]}

    def evaluate(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Mapping[str, float]:
        """A row is matched where each of its labels is the most likely token given the row so far. For a row with one
        completion the matched share is exactly the share that greedy decoding would write token for token, its end
        token included."""
        found = policy.figures(batch)
        return {
            "loss": float(found.losses.double().sum()),
            "label_tokens": batch.label_tokens,
            "matched": sum(bool(part.all()) for part in torch.split(found.right, batch.label_counts())),
            "rows": len(batch.lengths),
        }

    def held_out_figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        loss = sums["loss"] / sums["label_tokens"]
        figures = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
        if self.completions:
            figures["eval_exact_match"] = sums["matched"] / sums["rows"]
        return figures
