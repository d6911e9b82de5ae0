"""Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438) over the tokens of answers.

r_t = -β (log p_old - log p_ref) of each token; at the last token of an answer its reward is added
δ_t = r_t + γ V_{t+1} - V_t,   A_t = δ_t + γ λ A_{t+1}       beyond the last token both are 0
return_t = A_t + V_t

An answer that was cut off at its room ends as the others do: its reward is all that is known of it. In an episode of
several turns the tokens are those of the model: one of a reply has no value, and the next after it is the model's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.spec.axes.rollout.stages import PPOStage
from core.train.rollout.buffer import Rollout

VARIANCE_EPSILON = 1e-8
"""Added to the variance that advantages are divided by the root of, as verl does."""

Numbers = npt.NDArray[np.float32]


def estimate(rollout: Rollout, stage: PPOStage) -> list[float]:
    """Put `return` and `advantage` of each token beside its `value`; the mean advantage of each answer."""
    lengths, tokens = rollout.lengths(), rollout.token_values
    learned = rollout.all_masks()
    values = tokens["value"][learned]
    rewards = np.zeros_like(values)
    if stage.beta:
        rewards -= np.float32(stage.beta) * (tokens["old"] - tokens["reference"])[learned]
    rewards[np.cumsum(lengths) - 1] += np.asarray(rollout.total, dtype=np.float32)
    found = estimated(rewards, values, lengths, stage.gamma, stage.lam)
    for name, numbers in (
        ("return", found + values),
        ("advantage", whitened(found) if stage.whiten_advantages else found),
    ):
        tokens[name] = np.zeros_like(tokens["value"])
        tokens[name][learned] = numbers
    return [total / length for total, length in zip(rollout.answer_sums(tokens["advantage"]), lengths, strict=True)]


def estimated(rewards: Numbers, values: Numbers, lengths: list[int], gamma: float, lam: float) -> Numbers:
    """Advantage of each token of answers of these lengths, end to end; float64 arithmetic within an answer."""
    found, end = np.zeros(len(rewards), dtype=np.float32), 0
    for length in lengths:
        start, end = end, end + length
        after = ahead = 0.0
        for at in range(end - 1, start - 1, -1):
            value = float(values[at])
            ahead = float(rewards[at]) + gamma * after - value + gamma * lam * ahead
            after, found[at] = value, ahead
    return found


def whitened(values: Numbers) -> Numbers:
    """The values moved to mean 0 and divided by their standard deviation; a single one only moved."""
    wide = values.astype(np.float64)
    apart = wide - wide.mean()
    if len(values) > 1:
        apart /= np.sqrt(wide.var(ddof=1) + VARIANCE_EPSILON)
    found: Numbers = apart.astype(np.float32)
    return found


def explained_variance(rollout: Rollout) -> float:
    """Share of the variance of the returns that the values before the first step account for; 0 where returns do not
    vary."""
    learned = rollout.all_masks()
    returns = rollout.token_values["return"][learned].astype(np.float64)
    left = (returns - rollout.token_values["value"][learned]).var()
    return float(1 - left / returns.var()) if returns.var() > 0 else 0.0
