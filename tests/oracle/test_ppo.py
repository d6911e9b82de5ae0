"""PPO against verl's formulas (verl/trainer/ppo/core_algos.py, Apache-2.0), written here as they are published: over a
padded matrix of tokens with a mask, where ours go over tokens end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.spec.axes.rollout.stages import PPOStage
from core.train.batch import Batch
from core.train.rollout.buffer import Rollout
from core.train.rollout.estimation import estimate, explained_variance
from core.train.stages.rollout.ppo import ProximalPolicy

LENGTHS = [5, 1, 7, 3]
MASK = torch.tensor([[1.0] * length + [0.0] * (max(LENGTHS) - length) for length in LENGTHS])
SPEC: dict[str, Any] = {"reward": ["exact"], "beta": 0.05, "gamma": 0.97, "lam": 0.9, "epsilon_high": 0.3}


def masked_mean(values: Tensor) -> Tensor:
    return (values * MASK).sum() / (MASK.sum() + 1e-8)


def masked_whiten(values: Tensor) -> Tensor:
    mean, count = masked_mean(values), MASK.sum()
    variance = masked_mean((values - mean) ** 2) * count / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def advantages_and_returns(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """`compute_gae_advantage_return`."""
    next_values: Tensor | float = 0.0
    last: Tensor | float = 0.0
    found = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        there = delta + gamma * lam * last
        next_values = values[:, t] * MASK[:, t] + (1 - MASK[:, t]) * next_values
        last = there * MASK[:, t] + (1 - MASK[:, t]) * last
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    return masked_whiten(advantages), advantages + values


def policy_loss(old: Tensor, logps: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`compute_policy_loss`, with `loss_agg_mode="token-mean"`: the loss and the share that is clipped."""
    ratio = torch.exp(torch.clamp(logps - old, -20.0, 20.0))
    free, cut = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    return masked_mean(torch.maximum(free, cut)), masked_mean((cut > free).float())


def value_loss(values: Tensor, returns: Tensor, old: Tensor, near: float) -> tuple[Tensor, Tensor]:
    """`compute_value_loss`, with the same mean."""
    clipped = torch.clamp(values, old - near, old + near)
    free, cut = (values - returns) ** 2, (clipped - returns) ** 2
    return 0.5 * masked_mean(torch.maximum(free, cut)), masked_mean((cut > free).float())


class Fixed:
    """A policy that says these numbers of the labels."""

    def __init__(self, logps: Tensor, values: Tensor) -> None:
        self.said = logps, values

    def logprobs_and_values(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        return self.said


def flat(matrix: Tensor) -> Tensor:
    return matrix[MASK.bool()]


@pytest.mark.parametrize("seed", range(4))
def test_advantages_returns_and_losses_are_those_of_verl(seed: int) -> None:
    spec = PPOStage.model_validate(SPEC)
    torch.manual_seed(seed)
    old, reference, before = torch.rand(3, *MASK.shape).neg().unbind()
    scores, logps = torch.rand(len(LENGTHS)), (old + 0.4 * torch.randn(MASK.shape)).requires_grad_()
    values = (before + 0.4 * torch.randn(MASK.shape)).requires_grad_()
    # `apply_kl_penalty` with `kl_penalty="kl"`: the score is at the last token of each answer.
    rewards = -spec.beta * (old - reference) * MASK
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] += scores
    advantages, returns = advantages_and_returns(rewards, before, spec.gamma, spec.lam)
    chosen, clipped = policy_loss(old, logps, advantages, spec.epsilon, spec.epsilon_high or 0)
    missed, held = value_loss(values, returns, before, spec.epsilon_value)
    expected = chosen + spec.value_coef * missed
    theirs = torch.autograd.grad(expected, [logps, values])

    rollout = rolled_out({"old": old, "reference": reference, "value": before}, scores.tolist())
    each = estimate(rollout, spec)
    assert torch.allclose(torch.from_numpy(rollout.token_values["advantage"]), flat(advantages), atol=1e-5)
    assert torch.allclose(torch.from_numpy(rollout.token_values["return"]), flat(returns), atol=1e-5)
    assert each == pytest.approx([float(row[:n].mean()) for row, n in zip(advantages, LENGTHS, strict=True)], abs=1e-5)
    apart = flat(returns - before).var(unbiased=False) / flat(returns).var(unbiased=False)
    assert explained_variance(rollout) == pytest.approx(float(1 - apart), abs=1e-5)
    rollout.advantages = each
    batch = rollout.dataset().collate(range(len(LENGTHS)), 0)
    stage: Any = ProximalPolicy(spec)
    loss = stage.loss(Fixed(flat(logps), flat(values)), batch, {"tokens": sum(LENGTHS)})
    assert float(loss.total) == pytest.approx(float(expected), abs=1e-5)
    ours = torch.autograd.grad(loss.total, [logps, values])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    figures = stage.figures({name: float(value) for name, value in loss.sums.items()}, {})
    assert figures["value_loss"] == pytest.approx(float(missed), abs=1e-5)
    assert figures["policy_loss"] == pytest.approx(float(chosen), abs=1e-5)
    assert figures["value_clip_ratio"] == pytest.approx(float(held), abs=1e-6) and held > 0
    assert figures["clip_ratio"] == pytest.approx(float(clipped), abs=1e-6) and clipped > 0
    assert figures["kl"] == pytest.approx(float(masked_mean(logps - reference)), abs=1e-5)


def rolled_out(matrices: dict[str, Tensor], scores: list[float]) -> Rollout:
    values = {name: np.ascontiguousarray(flat(matrix).numpy()) for name, matrix in matrices.items()}
    answers = [list(range(4, 4 + length)) for length in LENGTHS]
    prompts = [[1, 2, 3]] * len(LENGTHS)
    return Rollout(
        0, prompts, list(range(len(LENGTHS))), answers, [True] * len(LENGTHS), {"r": scores}, scores,
        [0.0] * len(LENGTHS), values | {"sampler": values["old"]},
    )  # fmt: skip


def test_a_rollout_goes_through_a_checkpoint_to_the_bit_with_all_that_is_fixed() -> None:
    torch.manual_seed(7)
    old, reference, before = torch.rand(3, *MASK.shape).neg().unbind()
    rollout = rolled_out({"old": old, "reference": reference, "value": before}, [0.0, 1.0, 0.5, 1.0])
    rollout.advantages = estimate(rollout, PPOStage.model_validate(SPEC))
    again = Rollout.of(rollout.state_dict())
    assert again.state_dict() == rollout.state_dict()
    assert again.token_values.keys() == {"old", "reference", "value", "return", "advantage", "sampler"}
    assert again.figures(8)["reward_std"] > 0 and again.figures(8)["frac_reward_zero_std"] == 0.0


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_advantages_of_perfect_values_are_0(lam: float) -> None:
    """At γ = 1 the return of each token is the answer's reward; values that say so leave nothing to learn."""
    scores = [0.0, 1.0, 0.5, 0.25]
    perfect = torch.tensor(scores).unsqueeze(1).expand_as(MASK)
    rollout = rolled_out({"old": MASK, "reference": MASK, "value": perfect}, scores)
    estimate(rollout, PPOStage.model_validate(SPEC | {"gamma": 1.0, "lam": lam, "whiten_advantages": False}))
    assert np.abs(rollout.token_values["advantage"]).max() == 0.0
    assert explained_variance(rollout) == 1.0
