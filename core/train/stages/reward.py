"""Reward models over pairs of a chosen and a rejected answer (Bradley and Terry 1952; Ouyang et al. 2022):

    -logσ(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)²

s is the head's output at the last token of an answer, found by its length and not by a padding token. Margins come from
the rows; c keeps scores near 0 (Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import functional

from core.spec.axes.stage import Reward
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import MAXIMUM, Loss, Stage, Totals


class RewardModel(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over the pairs of a step."""

    name = "reward"
    title = "Reward model"
    loss_unit = "pairs"
    head = "score"
    dropout = False
    held_out_metrics = Reward.metrics

    def __init__(self, spec: Reward) -> None:
        self.spec = spec

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"pairs": 1}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        scores = policy.scores(batch)
        chosen, rejected = scores.unbind(dim=1)
        each = -functional.logsigmoid(chosen - rejected - batch.values["margin"])
        if self.spec.center_rewards_coefficient:
            each = each + self.spec.center_rewards_coefficient * (chosen + rejected) ** 2
        found = scores.detach().double()
        sums = {
            "loss": each.detach().double().sum(),
            "accuracy": (found[:, 0] > found[:, 1]).double().sum(),
            "margin": (found[:, 0] - found[:, 1]).sum(),
            "mean_reward": found.sum() / 2,
            f"{MAXIMUM}reward": found.max(),
            f"{MAXIMUM}-reward": (-found).max(),
        }
        return Loss(each.sum() / totals["pairs"], sums)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        means = {name: sums[name] / totals["pairs"] for name in ("loss", "accuracy", "margin", "mean_reward")}
        return means | {"min_reward": -sums[f"{MAXIMUM}-reward"], "max_reward": sums[f"{MAXIMUM}reward"]}
