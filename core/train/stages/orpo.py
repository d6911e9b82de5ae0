"""Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691), without a reference:

    NLL(prompt and chosen answer) - β logσ(log odds(p_chosen) - log odds(p_rejected)),   odds(p) = p / (1 - p)

p is the geometric mean of the probabilities of an answer's tokens. NLL is a mean over all tokens of the step, the other
term over its pairs. As in the paper's code and TRL, the cross-entropy counts the prompt's tokens too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from core.spec.axes.stage import ORPO
from core.train.batch import IGNORE_INDEX, Batch
from core.train.examples.rewards import label_counts, pair_figures, pair_sums
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class OddsRatioPreference(Stage):
    """A Stage (core/train/stage.py)."""

    name = "orpo"
    title = "Odds ratio preference optimization"
    loss_unit = "pairs"
    dropout = False
    held_out_metrics = ORPO.metrics

    def __init__(self, spec: ORPO) -> None:
        self.spec = spec

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"pairs": 1, "nll_tokens": lengths[0] - 1}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        whole, learned = _with_prompts(batch)
        tokens = policy.logprobs(whole)
        parts = torch.split(tokens, whole.label_counts())
        counts = batch.label_counts()
        # The labels of an answer are the marked ones among those of its sequence. Picking them out by the mask would
        # make the host wait for the device, which alone knows how many there are.
        answers = [torch.where(mark, part, 0.0).sum() for part, mark in zip(parts, learned, strict=True)]
        logps = torch.stack(answers).view(-1, 2)
        nll = -torch.stack([part.sum() for part in parts[::2]]).sum() * (1.0 if sum(counts) else 0.0)
        means = logps / label_counts(batch, logps)
        odds = means - _log1mexp(means)
        ratio = odds[:, 0] - odds[:, 1]
        log_odds = functional.logsigmoid(ratio)
        total = nll / totals["nll_tokens"] - self.spec.beta * log_odds.sum() / totals["pairs"]
        sums = pair_sums(-self.spec.beta * log_odds, self.spec.beta * means, logps)
        sums |= {
            "nll_loss": nll.detach().double(),
            "log_odds_ratio": log_odds.detach().double().sum(),
            "log_odds_chosen": ratio.detach().double().sum(),
        }
        return Loss(total, sums)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        nll = sums["nll_loss"] / totals["nll_tokens"]
        return (
            {"loss": nll + sums["loss"] / totals["pairs"]}
            | pair_figures(sums, totals)
            | {"nll_loss": nll}
            | {name: sums[name] / totals["pairs"] for name in ("log_odds_ratio", "log_odds_chosen")}
        )


def _with_prompts(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The batch with a label at every token of the chosen sequences, and which labels of each sequence are an
    answer's."""
    labels = batch.labels.clone()
    flat, ids = labels.view(-1), batch.row_ids()
    width = batch.input_ids.shape[1]
    starts, at = [], 0
    for row, length in enumerate(batch.lengths):
        starts.append(at if batch.packed else row * width)
        at += length
    learned, counts, before = [], [], []
    known = batch.labels.view(-1)
    for row, (start, length) in enumerate(zip(starts, batch.lengths, strict=True)):
        span = slice(start + 1, start + length)
        if row % 2 == 0 and batch.label_tokens:
            flat[span] = ids[span]
            learned.append(known[span] != IGNORE_INDEX)
            counts.append(length - 1)
            before.append(torch.arange(start, start + length - 1, device=labels.device))
        else:
            count = batch.label_counts()[row]
            learned.append(torch.ones(count, dtype=torch.bool, device=labels.device))
            counts.append(count)
            before.append(_places(batch, row))
    positions = torch.cat(before)
    return replace(
        batch, labels=labels, label_tokens=sum(counts), counts=tuple(counts), before_labels=positions, token_values={}
    ), learned


def _places(batch: Batch, row: int) -> Tensor:
    """Places before the labels of one sequence."""
    counts = batch.label_counts()
    start = sum(counts[:row])
    return batch.label_positions()[start : start + counts[row]]


def _log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 (Mächler 2012)."""
    near = torch.log(-torch.expm1(values))
    far = torch.log1p(-torch.exp(values))
    return torch.where(values > -0.6931472, near, far)
