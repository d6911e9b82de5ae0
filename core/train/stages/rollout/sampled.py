"""What the stages over sampled answers have in common: totals, figures, and sums over the tokens of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.errors import Fault
from core.spec.axes.rollout.stages import RolloutStage
from core.train.batch import Batch
from core.train.stage import Stage, Totals

FIGURE = "figure/"
"""Prefix of the totals that are figures of the rollout already (core/train/rollout)."""
MISMATCH = 1e-2
"""Divergence between the sampler and the trainer above which the job says so: ratios are off by about a seventh."""


class SampledAnswers(Stage):
    """Common part of these stages (core/train/stage.py). Batches have `values["advantage"]` [answers], and of each
    label `token_values["sampler"]`, its log-probability at the draw; `old` with several iterations."""

    dropout = False
    held_out_metrics = RolloutStage.metrics

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"tokens": sum(labels), "answers": 1}

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """`entropy` is an estimate: the mean of -log p over the tokens that were drawn. Tokens of groups without
        variance are not computed, and count for nothing in means over tokens."""
        tokens = max(1.0, sums.get("counted", 0.0))
        found = {"loss": sums["loss"]}
        found |= {name.removeprefix(FIGURE): value for name, value in totals.items() if name.startswith(FIGURE)}
        found["entropy"] = sums.get("entropy", 0.0) / tokens
        found["clip_ratio"] = sums.get("clipped", 0.0) / tokens
        found["sampler_mismatch_kl"] = sums.get("mismatch", 0.0) / tokens
        if "kl" in sums:
            found["kl"] = sums["kl"] / tokens
        return found

    def remark(self, figures: Mapping[str, float]) -> Fault | None:
        if (mismatch := figures["sampler_mismatch_kl"]) <= MISMATCH:
            return None
        return Fault(
            "sampler_mismatch",
            f"answers were drawn with other log-probabilities than training computes for them (sampler_mismatch_kl is "
            f"{mismatch:.2g}), which biases the gradient; set training.precision to fp32, or lower "
            "optimizer.learning_rate and stage.num_iterations",
            "training.precision",
        )


def token_sums(logps: Tensor, sampler: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """Sums of what is told of tokens. `sampler`: log-probabilities at the draw; `clipped`: which tokens have no
    gradient for their ratio."""
    apart = logps.detach() - sampler
    return {
        "counted": torch.ones_like(logps).double().sum(),
        "clipped": clipped.double().sum(),
        "entropy": -logps.detach().double().sum(),
        "mismatch": (torch.expm1(apart.double()) - apart.double()).sum(),
    }


def of_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Values of the answers, repeated for each of their tokens."""
    counts = torch.tensor(batch.label_counts()).to(values.device)
    return values.repeat_interleave(counts, output_size=batch.label_tokens)


def of_answers(values: Tensor, batch: Batch) -> Tensor:
    """Sums of the tokens' values over each answer."""
    return torch.stack([part.sum() for part in torch.split(values, batch.label_counts())])


def cut_off(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Where a ratio outside of [1 - low, 1 + high] has no gradient any more."""
    return ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
