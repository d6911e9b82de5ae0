"""Supervised fine-tuning: cross-entropy on the label tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, assert_never

import torch

from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals

LossType = Literal["nll", "dft"]
"""Loss of a token with probability p: -log p, or -p · log p with p as a constant factor (arXiv:2508.05629)."""


class SupervisedFineTuning(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over all label tokens of a step."""

    name = "sft"
    title = "Supervised fine-tuning"
    loss_unit = "label tokens"

    def __init__(self, *, completions: bool = True, loss_type: LossType = "nll") -> None:
        """`completions`: the labels are completions (or some of them), not all tokens of a row."""
        self.completions, self.loss_type = completions, loss_type
        metrics: dict[str, Literal["lower", "higher"]] = {"eval_loss": "lower", "eval_perplexity": "lower"}
        self.held_out_metrics = metrics | ({"eval_exact_match": "higher"} if completions else {})

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"label_tokens": sum(labels)}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        items = totals["label_tokens"]
        match self.loss_type:
            case "nll":
                total = policy.cross_entropy(batch, items)
                return Loss(total / items, {"loss": total.detach().double()})
            case "dft":
                logprobs = policy.logprobs(batch)
                total = -(logprobs.detach().exp() * logprobs).sum()
                sums = {"loss": total.detach().double(), "nll": -logprobs.detach().double().sum()}
                return Loss(total / items, sums)
            case _ as never:
                assert_never(never)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        figures = {"loss": sums["loss"] / totals["label_tokens"]}
        return figures | ({"nll_loss": sums["nll"] / totals["label_tokens"]} if "nll" in sums else {})

    def evaluate(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Mapping[str, float]:
        """A row is matched where each of its labels is the most likely token given the row so far. For a row with one
        completion the matched share is exactly the share that greedy decoding would write token for token, its end
        token included."""
        found = policy.figures(batch)
        nll = found.losses.double()
        return {
            "loss": float((nll if self.loss_type == "nll" else nll * (-nll).exp()).sum()),
            "nll": float(nll.sum()),
            "label_tokens": batch.label_tokens,
            "matched": sum(bool(part.all()) for part in torch.split(found.right, batch.label_counts())),
            "rows": len(batch.lengths),
        }

    def held_out_figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        loss = sums["loss"] / sums["label_tokens"]
        figures = {"eval_loss": loss, "eval_perplexity": math.exp(min(sums["nll"] / sums["label_tokens"], 700.0))}
        if self.completions:
            figures["eval_exact_match"] = sums["matched"] / sums["rows"]
        return figures
