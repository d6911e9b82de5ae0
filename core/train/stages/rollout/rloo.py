"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740) over answers that the model sampled itself.

R = reward - β Σ (log p_old - log p_ref),   A = R - mean of the others of the group

-min(r A, clip(r, 1 - ε, 1 + ε_high) A)     with r = p(answer) / p_old(answer), of the whole answer; mean over answers
"""

from __future__ import annotations

import torch

from core.spec.axes.rollout.stages import RLOO
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from core.train.stages.rollout.sampled import SampledAnswers, cut_off, of_answers, of_tokens, token_sums


class LeaveOneOutPolicy(SampledAnswers):
    """A Stage (core/train/stage.py). The divergence is part of the advantages (core/train/rollout/buffer.py)."""

    name = "rloo"
    title = "REINFORCE leave-one-out"
    loss_unit = "answers"

    def __init__(self, spec: RLOO) -> None:
        self.spec = spec
        self.high = spec.epsilon if spec.epsilon_high is None else spec.epsilon_high

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        spec = self.spec
        logps = policy.logprobs(batch, spec.temperature)
        old = batch.token_values.get("old", logps.detach())
        advantage = batch.values["advantage"]
        ratio = torch.exp(of_answers(logps - old, batch))
        cut = ratio.clamp(1 - spec.epsilon, 1 + self.high)
        total = -torch.minimum(ratio * advantage, cut * advantage).sum() / totals["answers"]
        clipped = of_tokens(cut_off(ratio, advantage, spec.epsilon, self.high), batch)
        sums = token_sums(logps, batch.token_values["sampler"], clipped)
        if spec.beta:
            sums["kl"] = (logps.detach() - batch.token_values["reference"]).double().sum()
        return Loss(total, {"loss": total.detach().double(), **sums})
