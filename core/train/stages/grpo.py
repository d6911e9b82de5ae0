"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) over answers that the model sampled itself.

r = p(token) / p_old(token),   A = (reward - mean of the group) / (std of the group + 1e-4)

dapo, grpo, dr_grpo   -min(r A, clip(r, 1 - ε, 1 + ε_high) A) + β k r
cispo                 -sg(min(r, ε_high)) A log p + β k r
k                     p_ref / p - log(p_ref / p) - 1, weighted by r since the answers are those of p_old

Which tokens a mean is over, the loss says: all of a step (dapo, cispo), those of an answer and then all answers (grpo),
or a fixed number (dr_grpo). Divisors count the answers of groups without variance too, whose gradient is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from core.spec.axes.rollout.stages import GRPO
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals

FIGURE = "figure/"
"""Prefix of the totals that are figures of the rollout already (core/train/rollout)."""
CISPO_HIGH = 5.0
"""`epsilon_high` of cispo where the job names none: beyond what a step's ratios reach."""


class GroupRelativePolicy(Stage):
    """A Stage (core/train/stage.py). Batches have `values["advantage"]` [answers], and of each label
    `token_values["sampler"]`, its log-probability at the draw; `old` with several iterations, and `reference` with a
    divergence."""

    name = "grpo"
    title = "Group relative policy optimization"
    loss_unit = "tokens of answers"
    dropout = False
    held_out_metrics = GRPO.metrics

    def __init__(self, spec: GRPO) -> None:
        self.spec = spec
        high = CISPO_HIGH if spec.loss == "cispo" else spec.epsilon
        self.high = high if spec.epsilon_high is None else spec.epsilon_high

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"tokens": sum(labels), "answers": 1}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        spec = self.spec
        logps = policy.logprobs(batch, spec.temperature)
        old = batch.token_values.get("old", logps.detach())
        counts = torch.tensor(batch.label_counts()).to(logps.device)
        advantage = batch.values["advantage"].repeat_interleave(counts, output_size=batch.label_tokens)
        ratio = torch.exp(logps - old)
        cut = ratio.clamp(1 - spec.epsilon, 1 + self.high)
        each = self._each(logps, ratio, cut, advantage)
        apart = logps.detach() - batch.token_values["sampler"]
        sums = {
            "counted": torch.ones_like(logps).double().sum(),
            "clipped": self._clipped(ratio, advantage).double().sum(),
            "entropy": -logps.detach().double().sum(),
            "mismatch": (torch.expm1(apart.double()) - apart.double()).sum(),
        }
        if spec.beta:
            gap = batch.token_values["reference"] - logps
            divergence = torch.exp(gap) - gap - 1
            each = each + spec.beta * divergence * ratio
            sums["kl"] = divergence.detach().double().sum()
        total = (each * self._weights(counts, batch, totals)).sum()
        return Loss(total, {"loss": total.detach().double(), **sums})

    def _each(self, logps: Tensor, ratio: Tensor, cut: Tensor, advantage: Tensor) -> Tensor:
        match self.spec.loss:
            case "dapo" | "grpo" | "dr_grpo":
                return -torch.minimum(ratio * advantage, cut * advantage)
            case "cispo":
                return -ratio.clamp(max=self.high).detach() * advantage * logps
            case _ as never:
                assert_never(never)

    def _clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which tokens have no gradient (cispo: a smaller one) for their ratio."""
        if self.spec.loss == "cispo":
            return (ratio > self.high) & (advantage > 0)
        low = (ratio < 1 - self.spec.epsilon) & (advantage < 0)
        return low | ((ratio > 1 + self.high) & (advantage > 0))

    def _weights(self, counts: Tensor, batch: Batch, totals: Totals) -> Tensor | float:
        """Share of each token in the step's loss."""
        match self.spec.loss:
            case "dapo" | "cispo":
                return 1 / totals["tokens"]
            case "grpo":
                each = 1 / (counts.float() * totals["answers"])
                return each.repeat_interleave(counts, output_size=batch.label_tokens)
            case "dr_grpo":
                return 1 / (totals["answers"] * self.spec.max_completion_length)
            case _ as never:
                assert_never(never)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """`entropy` is an estimate: the mean of -log p over the tokens that were drawn. Tokens of groups without
        variance are not computed, and count for nothing in means over tokens."""
        tokens = max(1.0, sums.get("counted", 0.0))
        found = {"loss": sums["loss"]}
        found |= {name.removeprefix(FIGURE): value for name, value in totals.items() if name.startswith(FIGURE)}
        found["entropy"] = sums.get("entropy", 0.0) / tokens
        found["clip_ratio"] = sums.get("clipped", 0.0) / tokens
        found["sampler_mismatch_kl"] = sums.get("mismatch", 0.0) / tokens
        if self.spec.beta:
            found["kl"] = sums.get("kl", 0.0) / tokens
        return found
