"""Simple preference optimization: -logσ(β (mean log p_chosen - mean log p_rejected) - γ), means over the tokens of an
answer (Meng et al. 2024, arXiv:2405.14734)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import functional

from core.spec.axes.stage import SimPO
from core.train.batch import Batch
from core.train.examples.rewards import label_counts, pair_figures, pair_sums
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class SimplePreference(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over the pairs of a step."""

    name = "simpo"
    title = "Simple preference optimization"
    loss_unit = "pairs"
    dropout = False
    held_out_metrics = SimPO.metrics

    def __init__(self, spec: SimPO) -> None:
        self.spec = spec

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"pairs": 1}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        logps = policy.sequence_logprobs(batch)
        rewards = self.spec.beta * logps / label_counts(batch, logps)
        each = -functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.spec.gamma)
        return Loss(each.sum() / totals["pairs"], pair_sums(each, rewards, logps))

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        return {"loss": sums["loss"] / totals["pairs"]} | pair_figures(sums, totals)
