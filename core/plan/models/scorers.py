"""Reward models beside the model that is trained: their bytes, and those of a pass over answers."""

from __future__ import annotations

from core.plan.activations import Numbers, Pass, ended, passed
from core.plan.device import Device
from core.plan.models.shape import ScorerShape
from core.plan.models.weights import headed, weigh
from core.spec.axes.method import Full
from core.spec.axes.rollout.models import model_rewards
from core.spec.axes.rollout.reward import ModelReward
from core.spec.job import JobSpec
from core.spec.settled import method_of


def scorer_bytes(spec: JobSpec, one: ScorerShape, device: Device) -> int:
    """Bytes of a reward model on the device: weights in the dtype of the trained model's, or packed as while it was
    trained; its adapter in float32. `spec`: the job whose answers it scores."""
    wide = isinstance(method_of(spec), Full) or device.precision(spec.training) == "fp32"
    if one.spec is None or isinstance(method_of(one.spec), Full):
        return (4 if wide else 2) * one.shape.parameters
    training = spec.training.model_copy(update={"precision": "fp32"} if wide else {})
    trained = one.spec.model_copy(update={"training": training})
    held = weigh(trained, headed(trained, one.shape), device)
    return held.weights + held.adapter


def scoring_bytes(spec: JobSpec, one: ScorerShape, numbers: Numbers, longest: int) -> int:
    """Bytes of a pass over answers, nothing kept. `longest`: tokens of a prompt with its answer."""
    reward = next((reward for _, name, reward in model_rewards(spec.stage) if name == one.reward), None)
    assert isinstance(reward, ModelReward), "the shape is of one of the job's rewards"
    longest = min(longest, reward.max_length or longest)
    what = Pass(reward.batch_size * longest, longest)
    return max(passed(one.shape, numbers, what), ended(one.shape, numbers, what.tokens))
