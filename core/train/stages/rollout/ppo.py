"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) over answers that the model sampled itself.

r = p(token) / p_old(token)

-min(r A, clip(r, 1 - ε, 1 + ε_high) A)  +  c / 2 · max((V - R)², (clip(V, V_old - ε_v, V_old + ε_v) - R)²)

Both are means over all tokens of a step. Old values V_old, returns R and advantages A are those of the rollout
(core/train/rollout/estimation.py), which has the divergence from the starting model in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.spec.axes.rollout.stages import PPOStage
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from core.train.stages.rollout.sampled import SampledAnswers, cut_off, token_sums


class ProximalPolicy(SampledAnswers):
    """A Stage (core/train/stage.py). Labels have `token_values` `old`, `value`, `return` and `advantage`, and
    `reference` with a divergence."""

    name = "ppo"
    title = "Proximal policy optimization"
    loss_unit = "tokens of answers"

    def __init__(self, spec: PPOStage) -> None:
        self.spec = spec
        self.high = spec.epsilon if spec.epsilon_high is None else spec.epsilon_high

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        spec, of = self.spec, batch.token_values
        logps, values = policy.logprobs_and_values(batch, spec.temperature)
        apart = logps - of["old"]
        ratio, advantage = torch.exp(apart), of["advantage"]
        chosen = -torch.minimum(ratio * advantage, ratio.clamp(1 - spec.epsilon, 1 + self.high) * advantage)
        missed, held = self._value_losses(values, of["value"], of["return"])
        value_loss = 0.5 * torch.maximum(missed, held)
        total = (chosen + spec.value_coef * value_loss).sum() / totals["tokens"]
        sums = token_sums(logps, of["sampler"], cut_off(ratio, advantage, spec.epsilon, self.high))
        sums["policy_loss"] = chosen.detach().double().sum()
        sums["value_loss"] = value_loss.detach().double().sum()
        sums["value_clipped"] = (held > missed).double().sum()
        sums["moved"] = 0.5 * apart.detach().double().square().sum()
        if spec.beta:
            sums["kl"] = (logps.detach() - of["reference"]).double().sum()
        return Loss(total, {"loss": total.detach().double(), **sums})

    def _value_losses(self, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors of the values, and of those that stay near the old ones."""
        near = old + (values - old).clamp(-self.spec.epsilon_value, self.spec.epsilon_value)
        return (values - returns).square(), (near - returns).square()

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """`approx_kl`: half the mean squared difference of the log-probabilities to those before the first step over
        the same answers."""
        tokens = max(1.0, sums.get("counted", 0.0))
        return super().figures(sums, totals) | {
            "policy_loss": sums.get("policy_loss", 0.0) / tokens,
            "value_loss": sums.get("value_loss", 0.0) / tokens,
            "value_clip_ratio": sums.get("value_clipped", 0.0) / tokens,
            "approx_kl": sums.get("moved", 0.0) / tokens,
        }
