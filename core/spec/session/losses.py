"""Losses of a session, by name. All of them are sums over the tokens of a call, never means, so that a batch may be
sent in parts: the gradients of all calls up to a step add up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.base import SpecModel, by_type, short_form

Epsilon = Annotated[float, Field(ge=0, le=1e6)]


class CrossEntropy(SpecModel):
    """-w log p of each target; `weights` of the data are w, 1 where they are not given."""

    type: Literal["cross_entropy"] = "cross_entropy"


class ImportanceSampling(SpecModel):
    """-r A, with r = p / p_old. The data have `logprobs` (log p_old, at the draw) and `advantages` (A)."""

    type: Literal["importance_sampling"] = "importance_sampling"


class PPO(SpecModel):
    """-min(r A, clip(r) A) (Schulman et al. 2017, arXiv:1707.06347). Data as for `importance_sampling`."""

    type: Literal["ppo"] = "ppo"
    clip_low: Epsilon = 0.8
    """Lower bound of the clipped ratio."""
    clip_high: Epsilon = 1.2
    """Upper bound of the clipped ratio."""


class CISPO(SpecModel):
    """-sg(clip(r)) A log p (MiniMax-M1, arXiv:2506.13585). Data as for `importance_sampling`."""

    type: Literal["cispo"] = "cispo"
    clip_low: Epsilon = 0.8
    """Lower bound of the clipped ratio."""
    clip_high: Epsilon = 1.2
    """Upper bound of the clipped ratio."""


class GSPO(SpecModel):
    """-min(r A, clip(r) A) with r = s exp(log p - sg(log p)): the value of s, which is exp of the mean of
    sg(log p) - log p_old over the tokens of an example whose `sequence_ratio_mask` is not 0, and the gradient of each
    token (GSPO-token; Zheng et al. 2025, arXiv:2507.18071). Data as for `importance_sampling`, and that mask."""

    type: Literal["gspo"] = "gspo"
    clip_low: Epsilon = 0.9997
    """Lower bound of the clipped ratio."""
    clip_high: Epsilon = 1.0004
    """Upper bound of the clipped ratio."""


class DRO(SpecModel):
    """-(A log p - β/2 (log r)²) (Richemond et al. 2024, arXiv:2405.19107). Data as for `importance_sampling`."""

    type: Literal["dro"] = "dro"
    beta: Annotated[float, Field(ge=0, le=1e6)] = 0.05
    """Strength of the quadratic term."""


class DPOPairs(SpecModel):
    """-log σ(β (log r_chosen - log r_rejected)) over pairs (Rafailov et al. 2023, arXiv:2305.18290). Examples come in
    pairs, first the chosen one and then the rejected one; `logprobs` are those of the reference model."""

    type: Literal["dpo"] = "dpo"
    beta: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """Strength of the implied divergence."""


class Custom(SpecModel):
    """Any loss that the caller computes from log-probabilities: `gradients` of the data are its derivative by each
    target's log-probability, as `forward` answered them."""

    type: Literal["custom"] = "custom"


Losses = CrossEntropy | ImportanceSampling | PPO | CISPO | GSPO | DRO | DPOPairs | Custom
SessionLoss = Annotated[Losses, Field(discriminator="type"), short_form(by_type)]
