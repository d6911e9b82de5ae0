"""The reward models that a stage names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from core.spec.axes.rollout.reward import ModelReward, names_of
from core.spec.axes.rollout.stages import RolloutStage

T = TypeVar("T", bound=Any)


def model_rewards(stage: Any) -> list[tuple[str, str, ModelReward]]:
    """(field of the model, name of the reward, the reward) of each reward of `type: model`; of any stage."""
    if not isinstance(stage, RolloutStage):
        return []
    named = zip(names_of(stage.reward), stage.reward, strict=True)
    return [
        (f"stage.reward.{at}.model", name, one) for at, (name, one) in enumerate(named) if isinstance(one, ModelReward)
    ]


def with_models(stage: T, change: Callable[[Any, str], Any]) -> T:
    """The stage with what `change` makes of each reward model and its field; any other stage as it is."""
    if not model_rewards(stage):
        return stage
    rewards = [
        one.model_copy(update={"model": change(one.model, f"stage.reward.{at}.model")})
        if isinstance(one, ModelReward)
        else one
        for at, one in enumerate(stage.reward)
    ]
    changed: T = stage.model_copy(update={"reward": rewards})
    return changed
