"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) over answers that the model sampled itself.

r = p(token) / p_old(token),   A = (reward - mean of the group) / (std of the group + 1e-4)

dapo, grpo, dr_grpo   -min(r A, clip(r, 1 - ε, 1 + ε_high) A) + β k r
gspo                  the same with the geometric mean of r over the tokens of the answer in place of r
cispo                 -sg(min(r, ε_high)) A log p + β k r
k                     p_ref / p - log(p_ref / p) - 1, weighted by r since the answers are those of p_old

Which tokens a mean is over, the loss says: all of a step (dapo, cispo), those of an answer and then all answers (grpo,
gspo), or a fixed number (dr_grpo). Divisors count the answers of groups without variance too, whose gradient is 0.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from core.spec.axes.rollout.stages import GRPO
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from core.train.stages.rollout.sampled import SampledAnswers, cut_off, of_answers, of_tokens, token_sums

CISPO_HIGH = 5.0
"""`epsilon_high` of cispo where the job names none: beyond what a step's ratios reach."""


class GroupRelativePolicy(SampledAnswers):
    """A Stage (core/train/stage.py). Labels have `token_values["reference"]` too with a divergence."""

    name = "grpo"
    title = "Group relative policy optimization"
    loss_unit = "tokens of answers"

    def __init__(self, spec: GRPO) -> None:
        self.spec = spec
        high = CISPO_HIGH if spec.loss == "cispo" else spec.epsilon
        self.high = high if spec.epsilon_high is None else spec.epsilon_high

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        spec = self.spec
        logps = policy.logprobs(batch, spec.temperature)
        old = batch.token_values.get("old", logps.detach())
        counts = torch.tensor(batch.label_counts()).to(logps.device)
        advantage = of_tokens(batch.values["advantage"], batch)
        ratio = self._ratio(logps - old, counts, batch)
        cut = ratio.clamp(1 - spec.epsilon, 1 + self.high)
        each = self._each(logps, ratio, cut, advantage)
        sums = token_sums(logps, batch.token_values["sampler"], self._clipped(ratio, advantage))
        if spec.beta:
            gap = batch.token_values["reference"] - logps
            divergence = torch.exp(gap) - gap - 1
            each = each + spec.beta * divergence * ratio
            sums["kl"] = divergence.detach().double().sum()
        total = (each * self._weights(counts, batch, totals)).sum()
        return Loss(total, {"loss": total.detach().double(), **sums})

    def _ratio(self, apart: Tensor, counts: Tensor, batch: Batch) -> Tensor:
        """Ratio of each token; `apart`: differences of the log-probabilities."""
        if self.spec.loss != "gspo":
            return torch.exp(apart)
        return of_tokens(torch.exp(of_answers(apart, batch) / counts), batch)

    def _each(self, logps: Tensor, ratio: Tensor, cut: Tensor, advantage: Tensor) -> Tensor:
        match self.spec.loss:
            case "dapo" | "grpo" | "dr_grpo" | "gspo":
                return -torch.minimum(ratio * advantage, cut * advantage)
            case "cispo":
                return -ratio.clamp(max=self.high).detach() * advantage * logps
            case _ as never:
                assert_never(never)

    def _clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Which tokens have no gradient (cispo: a smaller one) for their ratio."""
        if self.spec.loss == "cispo":
            return (ratio > self.high) & (advantage > 0)
        return cut_off(ratio, advantage, self.spec.epsilon, self.high)

    def _weights(self, counts: Tensor, batch: Batch, totals: Totals) -> Tensor | float:
        """Share of each token in the step's loss."""
        match self.spec.loss:
            case "dapo" | "cispo":
                return 1 / totals["tokens"]
            case "grpo" | "gspo":
                each = 1 / (counts.float() * totals["answers"])
                return each.repeat_interleave(counts, output_size=batch.label_tokens)
            case "dr_grpo":
                return 1 / (totals["answers"] * self.spec.max_completion_length)
            case _ as never:
                assert_never(never)
