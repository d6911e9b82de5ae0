"""Losses of a session over log-probabilities of targets: core/spec/session/losses.py has their formulas."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from core.spec.session.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, Custom, DPOPairs, ImportanceSampling, Losses
from core.train.batch import Batch
from core.train.logits import label_hidden, label_logits
from core.train.loss.likeliest import likeliest
from core.train.loss.linear_cross_entropy import token_logprobs
from core.train.policy import PolicyModel
from core.train.session.examples import CHOICES, SessionExample
from core.train.session.faults import BadOperation


def check_loss(loss: Losses, examples: list[SessionExample]) -> None:
    """BadOperation where the examples lack what the loss needs, or have what it would ignore."""
    match loss:
        case CrossEntropy():
            needs, takes = set[str](), {"weights", CHOICES}
        case ImportanceSampling() | PPO() | CISPO() | DRO():
            needs, takes = {"logprobs", "advantages"}, {"logprobs", "advantages"}
        case GSPO():
            needs = takes = {"logprobs", "advantages", "sequence_ratio_mask"}
        case DPOPairs():
            needs, takes = {"logprobs"}, {"logprobs"}
            if len(examples) % 2:
                raise BadOperation("`dpo` takes pairs: an even number of examples, chosen first", field="lengths")
        case Custom():
            needs, takes = {"gradients"}, {"gradients"}
        case _ as never:
            assert_never(never)
    given = set(examples[0].values)
    if lacks := sorted(needs - given):
        raise BadOperation(f"`{loss.type}` needs the array `{lacks[0]}`", field=lacks[0])
    if CHOICES in given - takes:
        raise BadOperation(f"`{loss.type}` has one target a token; `cross_entropy` takes several", field="targets")
    if odd := sorted(given - takes):
        raise BadOperation(f"`{loss.type}` has no use for the array `{odd[0]}`", field=odd[0])


def logprobs_of(policy: PolicyModel, batch: Batch) -> Tensor:
    """Log-probability of each target, float32 [targets], or of each of its choices, [targets, choices]."""
    choices = batch.token_values.get(CHOICES)
    if choices is None:
        return policy.logprobs(batch)
    head = policy.whole_logits or policy.head()
    if isinstance(head, str):
        logits, _ = label_logits(policy.model, batch)
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, choices)
    hidden, _ = label_hidden(head, batch)
    many = hidden.repeat_interleave(choices.shape[1], dim=0)
    found = token_logprobs(many, head.weight, choices.flatten(), bias=head.bias, options=head.options)
    return found.view(choices.shape)


def logprobs_and_likeliest(policy: PolicyModel, batch: Batch, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute in one pass the log-probability of each target, float32 [targets], and the `most` likeliest tokens in its
    place: their log-probabilities, float32 [targets, most], and their ids, int64 [targets, most]."""
    head = policy.whole_logits or policy.head()
    if isinstance(head, str):
        logits, targets = label_logits(policy.model, batch)
        found = torch.log_softmax(logits.float(), dim=-1)
        best = found.topk(most)
        return found.gather(-1, targets.unsqueeze(-1)).squeeze(-1), best.values, best.indices
    hidden, targets = label_hidden(head, batch)
    own = token_logprobs(hidden, head.weight, targets, bias=head.bias, options=head.options)
    return own, *likeliest(hidden, head.weight, most, bias=head.bias, options=head.options)


def rows_together(loss: Losses) -> int:
    """Examples that one term of the loss is of."""
    return 2 if isinstance(loss, DPOPairs) else 1


def loss_sum(loss: Losses, logprobs: Tensor, batch: Batch) -> Tensor:
    """The loss of a pass, summed: a scalar with gradient. `logprobs`: float32 [targets], or [targets, choices]."""
    values = batch.token_values
    match loss:
        case CrossEntropy():
            return -(logprobs * values["weights"]).sum() if "weights" in values else -logprobs.sum()
        case ImportanceSampling():
            return -(torch.exp(logprobs - values["logprobs"]) * values["advantages"]).sum()
        case PPO(clip_low=low, clip_high=high):
            ratio, advantages = torch.exp(logprobs - values["logprobs"]), values["advantages"]
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        case CISPO(clip_low=low, clip_high=high):
            ratio = torch.exp(logprobs - values["logprobs"]).clamp(low, high).detach()
            return -(ratio * values["advantages"] * logprobs).sum()
        case GSPO(clip_low=low, clip_high=high):
            ratio = _of_sequences(logprobs, batch) * torch.exp(logprobs - logprobs.detach())
            advantages = values["advantages"]
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        case DRO(beta=beta):
            gap = logprobs - values["logprobs"]
            return -(logprobs * values["advantages"] - beta / 2 * gap.square()).sum()
        case DPOPairs(beta=beta):
            parts = torch.split(logprobs - values["logprobs"], batch.label_counts())
            sums = torch.stack([part.sum() for part in parts]).view(-1, 2)
            return -functional.logsigmoid(beta * (sums[:, 0] - sums[:, 1])).sum()
        case Custom():
            return (logprobs * values["gradients"]).sum()
        case _ as never:
            assert_never(never)


def _of_sequences(logprobs: Tensor, batch: Batch) -> Tensor:
    """The ratio of each target's example, without gradient: exp of the mean of log p - log p_old over its mask. 1 where
    the mask is empty."""
    counts, mask = batch.label_counts(), batch.token_values["sequence_ratio_mask"]
    gaps = (logprobs.detach() - batch.token_values["logprobs"]) * mask
    means = [
        gap.sum() / kept.sum().clamp(min=1e-30) if len(gap) else gap.sum()
        for gap, kept in zip(torch.split(gaps, counts), torch.split(mask, counts), strict=True)
    ]
    return torch.exp(torch.stack(means)).repeat_interleave(torch.tensor(counts, device=logprobs.device))
