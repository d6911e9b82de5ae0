"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306), over single answers labelled good or bad:

    w_good (1 - σ(β (r - kl))),  w_bad (1 - σ(β (kl - r))),   r = log p(answer) - log p_start(answer)

kl estimates how far the model has come from where it started: the mean of r over answers to other prompts, at least 0,
without gradient. Each row has one, that of another row, chosen once from the seed (core/train/examples/mismatched.py);
the mean is over all rows of a step, so that it does not depend on how the step is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from core.spec.axes.stage import KTO
from core.train.batch import Batch
from core.train.examples.rewards import ANSWERS
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class KahnemanTversky(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over the rows of a step."""

    name = "kto"
    title = "Kahneman-Tversky optimization"
    loss_unit = "rows"
    reference = True
    dropout = False
    prelude_sequences = (1,)
    continues = True
    held_out_metrics = KTO.metrics

    def __init__(self, spec: KTO) -> None:
        self.spec = spec

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"rows": 1}

    def prelude(self, policy: PolicyModel, batch: Batch) -> Mapping[str, Tensor]:
        ratios = policy.sequence_logprobs(batch) - batch.values["reference"]
        return {"kl": ratios.double().sum()}

    def totals(self, sums: Mapping[str, float], totals: Totals) -> Totals:
        return {"kl": max(0.0, sums["kl"] / totals["rows"])}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        found: Totals = {}
        if batch.beside is None:
            logps = policy.sequence_logprobs(batch)[:, 0]
        else:
            both, before = policy.continued(batch, partial(self.prelude, policy))
            logps = both[:, 0]
            found = self.totals({name: float(value) for name, value in before.items()}, totals)
            totals = {**totals, **found}
        ratios = logps - batch.values["reference"][:, 0]
        good, beta, kl = batch.values["label"] > 0.5, self.spec.beta, totals["kl"]
        desirable = self.spec.desirable_weight * (1 - torch.sigmoid(beta * (ratios - kl)))
        undesirable = self.spec.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratios)))
        each = torch.where(good, desirable, undesirable)
        sums = {"loss": each.detach().double().sum()}
        rewards, values = (beta * ratios).detach().double(), logps.detach().double()
        for answer, kind in zip(ANSWERS, (good, ~good), strict=True):
            sums[f"count/{answer}"] = kind.double().sum()
            sums[f"rewards/{answer}"] = torch.where(kind, rewards, 0.0).sum()
            sums[f"logps/{answer}"] = torch.where(kind, values, 0.0).sum()
        return Loss(each.sum() / totals["rows"], sums, found)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """A step that has no good (or no bad) row has no rewards of that kind, and its margin takes 0 for them."""
        found = {"loss": sums["loss"] / totals["rows"], "kl": totals["kl"]}
        rewards = dict.fromkeys(ANSWERS, 0.0)
        for answer in ANSWERS:
            if count := sums[f"count/{answer}"]:
                rewards[answer] = sums[f"rewards/{answer}"] / count
                found[f"rewards/{answer}"] = rewards[answer]
                found[f"logps/{answer}"] = sums[f"logps/{answer}"] / count
        return found | {"rewards/margins": rewards["chosen"] - rewards["rejected"]}
