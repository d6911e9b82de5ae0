"""Direct preference optimization and losses of its form, over pairs of a chosen and a rejected answer.

r = log p(answer) - log p_start(answer),   Δ = β (r_chosen - r_rejected)

sigmoid   -(1 - s) logσ(Δ) - s logσ(-Δ)                      Rafailov et al. 2023; s: label smoothing (cDPO)
robust    (-(1 - s) logσ(Δ) + s logσ(-Δ)) / (1 - 2s)         Chowdhury et al. 2024
hinge     max(0, 1 - Δ)                                      Zhao et al. 2023
ipo       (mean r_chosen - mean r_rejected - 1 / 2β)²        Azar et al. 2023; means over tokens
kto_pair  1 - σ(β (r_chosen - kl_rejected)), 1 - σ(β (kl_chosen - r_rejected)), the two halves of a mean
          kl: mean of r over all answers of that kind of the step, no gradient, at least 0   Ethayarajh et al. 2024
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from core.spec.axes.stage import DPO
from core.train.batch import Batch
from core.train.examples.rewards import label_counts, pair_figures, pair_sums
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class DirectPreference(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over the pairs of a step."""

    name = "dpo"
    title = "Direct preference optimization"
    loss_unit = "pairs"
    reference = True
    dropout = False
    held_out_metrics = DPO.metrics

    def __init__(self, spec: DPO) -> None:
        self.spec = spec
        self.prelude_sequences = (0, 1) if spec.loss == "kto_pair" else ()

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"pairs": 1, "chosen_tokens": labels[0]}

    def prelude(self, policy: PolicyModel, batch: Batch) -> Mapping[str, Tensor]:
        chosen, rejected = (policy.sequence_logprobs(batch) - batch.values["reference"]).double().unbind(1)
        return {"chosen": chosen.sum(), "rejected": rejected.sum()}

    def totals(self, sums: Mapping[str, float], totals: Totals) -> Totals:
        return {f"kl_{name}": max(0.0, value / totals["pairs"]) for name, value in sums.items()}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        tokens = policy.logprobs(batch)
        parts = torch.split(tokens, batch.label_counts())
        logps = torch.stack([part.sum() for part in parts]).view(-1, 2)
        ratios = logps - batch.values["reference"]
        each = self._each(ratios, batch, totals)
        total = each.sum() / totals["pairs"]
        sums = pair_sums(each, self.spec.beta * ratios, logps)
        if self.spec.nll_weight:
            nll = -logps[:, 0].sum()
            total = total + nll * (self.spec.nll_weight / totals["chosen_tokens"])
            sums["nll_loss"] = nll.detach().double()
        return Loss(total, sums)

    def _each(self, ratios: Tensor, batch: Batch, totals: Totals) -> Tensor:
        beta, smoothing = self.spec.beta, self.spec.label_smoothing
        delta = beta * (ratios[:, 0] - ratios[:, 1])
        match self.spec.loss:
            case "sigmoid":
                right, wrong = functional.logsigmoid(delta), functional.logsigmoid(-delta)
                return -(1 - smoothing) * right - smoothing * wrong
            case "robust":
                right, wrong = functional.logsigmoid(delta), functional.logsigmoid(-delta)
                return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)
            case "hinge":
                return torch.relu(1 - delta)
            case "ipo":
                means = ratios / label_counts(batch, ratios)
                return (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
            case "kto_pair":
                chosen = 1 - torch.sigmoid(beta * (ratios[:, 0] - totals["kl_rejected"]))
                rejected = 1 - torch.sigmoid(beta * (totals["kl_chosen"] - ratios[:, 1]))
                return (chosen + rejected) / 2
            case _ as never:
                assert_never(never)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        loss, found = sums["loss"] / totals["pairs"], pair_figures(sums, totals)
        if self.spec.nll_weight:
            nll = sums["nll_loss"] / totals["chosen_tokens"]
            loss, found = loss + self.spec.nll_weight * nll, found | {"nll_loss": nll}
        if self.spec.loss == "kto_pair":
            found |= {name: totals[name] for name in ("kl_chosen", "kl_rejected")}
        return {"loss": loss} | found
