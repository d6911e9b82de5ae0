"""Process reward models: cross-entropy of right or wrong at the separator behind each step of a solution (Lightman et
al. 2023, arXiv:2305.20050)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import functional

from core.spec.axes.stage import ProcessReward
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Stage, Totals


class ProcessRewardModel(Stage):
    """A Stage (core/train/stage.py). Its loss is the mean over the judged steps of an optimizer step."""

    name = "process_reward"
    title = "Process reward model"
    loss_unit = "judged steps"
    head = "labels"
    dropout = False
    held_out_metrics = ProcessReward.metrics

    def shares(self, lengths: Sequence[int], labels: Sequence[int]) -> Mapping[str, int]:
        return {"judged_steps": sum(labels)}

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        logits = policy.label_scores(batch)
        right = batch.token_values["label"] > 0.5
        total = functional.cross_entropy(logits, right.long(), reduction="sum")
        said_wrong, wrong = logits[:, 0] > logits[:, 1], ~right
        sums = {
            "loss": total.detach().double(),
            "correct": (said_wrong == wrong).double().sum(),
            "wrong": wrong.double().sum(),
            "said_wrong": said_wrong.double().sum(),
            "found_wrong": (said_wrong & wrong).double().sum(),
        }
        return Loss(total / totals["judged_steps"], sums)

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        """`f1` is that of wrong steps; 0 where there are none and none is called wrong."""
        count, named = totals["judged_steps"], sums["wrong"] + sums["said_wrong"]
        return {
            "loss": sums["loss"] / count,
            "accuracy": sums["correct"] / count,
            "f1": 2 * sums["found_wrong"] / named if named else 0.0,
        }
