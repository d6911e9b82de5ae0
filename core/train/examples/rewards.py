"""What stages of preferences share: sums and figures of rewards, with the names that TRL gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.train.batch import Batch

ANSWERS = ("chosen", "rejected")


def label_counts(batch: Batch, like: Tensor) -> Tensor:
    """Labels of each sequence [examples, sequences], at least 1."""
    counts = torch.tensor([max(1, count) for count in batch.label_counts()], dtype=like.dtype)
    return counts.to(like.device, non_blocking=True).view(-1, batch.sequences)


def pair_sums(losses: Tensor, rewards: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """Sums over the pairs of a batch: losses [pairs]; rewards and log-probabilities [pairs, chosen and rejected]."""
    rewards, logps = rewards.detach().double(), logps.detach().double()
    sums = {"loss": losses.detach().double().sum()}
    for place, answer in enumerate(ANSWERS):
        sums[f"rewards/{answer}"] = rewards[:, place].sum()
    sums["rewards/accuracies"] = (rewards[:, 0] > rewards[:, 1]).double().sum()
    for place, answer in enumerate(ANSWERS):
        sums[f"logps/{answer}"] = logps[:, place].sum()
    return sums


def pair_figures(sums: Mapping[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Means over the pairs of a step, the margin among them. The loss is left as it is: not all are means of pairs."""
    pairs = totals["pairs"]
    chosen, rejected = (sums[f"rewards/{answer}"] / pairs for answer in ANSWERS)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": sums["rewards/accuracies"] / pairs,
        "rewards/margins": chosen - rejected,
        "logps/chosen": sums["logps/chosen"] / pairs,
        "logps/rejected": sums["logps/rejected"] / pairs,
    }
