"""The stages that learn from answers which the model samples itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from core.spec.axes.data import RowFormat
from core.spec.axes.rollout.environment import EnvironmentArm
from core.spec.axes.rollout.reward import RewardError, Rewards
from core.spec.base import SpecModel


class RolloutStage(SpecModel):
    """Common fields of the stages that learn from sampled answers; not an arm. As with TRL, a step has
    `per_device_train_batch_size` · `gradient_accumulation_steps` answers, `num_generations` to a prompt."""

    type: str
    rows: ClassVar[tuple[RowFormat, ...]] = ("prompt",)
    sequences: ClassVar[int] = 1
    metrics: ClassVar[Mapping[str, Literal["lower", "higher"]]] = {"eval_reward": "higher"}
    head: ClassVar[Literal["tokens"]] = "tokens"
    reward: Rewards
    """What answers are rewarded for: a list of rewards, whose weighted sum counts."""
    reward_error: RewardError = "fail"
    """If a reward cannot be computed, because it raises, takes too long or answers no finite number: `fail` ends the
    job and names the row; `zero` counts the reward as 0; `skip` counts the sum of all answers to that prompt as 0, so
    that nothing is learned from comparing them."""
    environment: EnvironmentArm | None = None
    """What replies to the model's answers, for episodes of several turns (docs/rollouts.md). Rewards read the model's
    last turn, and the reward `model` all of them. Default: an answer is one turn."""
    num_generations: Annotated[int, Field(ge=2, le=1024)] = 8
    """Answers to each prompt."""
    max_completion_length: Annotated[int, Field(ge=1, le=131_072)] = 256
    """Tokens of an answer at most. Prompts have room for `training.max_length` less these."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Temperature of the draws, and of the log-probabilities in the loss."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the most likely tokens that have this probability together. Below 1 the loss is biased: it is computed
    over all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw among so many tokens; 0: no limit. The same holds."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw no token less likely than this share of the most likely one's probability. The same holds."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=20)] = Field(default=[])
    """Strings that end an answer, beside the end tokens of the model."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 32
    """Answers in the making at the same time."""
    sampler: Literal["default", "exact"] = "default"
    """`exact`: the log-probabilities with which tokens are drawn are those that training computes for them, to the bit,
    so that `sampler_mismatch_kl` is 0.0. Steps take longer (docs/rollouts.md)."""
    eval_temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Temperature of answers to held-out prompts; 0: the most likely token each time."""
    num_generations_eval: Annotated[int, Field(ge=1, le=1024)] = 1
    """Answers to each held-out prompt. At `eval_temperature: 0` all of them would be the same, so 1 is enough."""
    beta: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the divergence from the model that training starts from; 0: none is computed."""
    num_iterations: Annotated[int, Field(ge=1, le=100)] = 1
    """Optimizer steps over the same answers."""
    force: bool = False
    """Train although a trial (`eft rewards try`) found that nearly all groups of answers have one reward, so that there
    is next to nothing to learn."""


class GroupStage(RolloutStage):
    """Common fields of the stages that compare the answers to a prompt; not an arm."""

    max_resamples: Annotated[int, Field(ge=0, le=100)] = 0
    """Times at most that a group whose answers all have the same reward is drawn anew, since nothing is learned from
    it. It stays as it is where no draw makes a difference."""


class GRPO(GroupStage):
    """Group relative policy optimization: the model answers each prompt several times, and answers with a larger reward
    than the others of their prompt become more likely (Shao et al. 2024, arXiv:2402.03300). As with TRL, a step has
    `per_device_train_batch_size` · `gradient_accumulation_steps` answers, `num_generations` to a prompt."""

    type: Literal["grpo"] = "grpo"
    loss: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] = "dapo"
    """`dapo`: mean over all tokens of a step (arXiv:2503.14476). `grpo`: mean over the tokens of each answer, then over
    answers. `dr_grpo`: sum over tokens, divided by answers · `max_completion_length` (arXiv:2503.20783). `cispo`: the
    ratio as a constant factor that is cut off at `epsilon_high` (arXiv:2506.13585), mean over all tokens. `gspo`:
    `grpo` with one ratio for all tokens of an answer, their geometric mean (arXiv:2507.18071); its `epsilon` is usually
    about 4e-4."""
    epsilon: Annotated[float, Field(gt=0, le=100)] = 0.2
    """How far the ratio to the probability at the draw may fall (and rise) before its gradient is cut off."""
    epsilon_high: Annotated[float, Field(gt=0, le=100)] | None = None
    """How far it may rise. Default: `epsilon`; 5 for `cispo`."""
    scale_rewards: Literal["group", "none"] = "group"
    """`group`: divide advantages by the standard deviation of their group's rewards. `none`: do not."""


class RLOO(GroupStage):
    """REINFORCE leave-one-out: the model answers each prompt several times, and answers whose reward is above the mean
    of the others become more likely (Ahmadian et al. 2024, arXiv:2402.14740). The ratio that is cut off is that of the
    whole answer. `beta` weighs the divergence of an answer as a part of its reward. As with TRL, a step has
    `per_device_train_batch_size` · `gradient_accumulation_steps` answers, `num_generations` to a prompt."""

    type: Literal["rloo"] = "rloo"
    epsilon: Annotated[float, Field(gt=0, le=100)] = 0.2
    """How far the ratio of an answer's probability to that at the draw may fall (and rise) before its gradient is cut
    off."""
    epsilon_high: Annotated[float, Field(gt=0, le=100)] | None = None
    """How far it may rise. Default: `epsilon`."""
    normalize_advantages: bool = False
    """Move the advantages of a step to mean 0 and divide them by their standard deviation. Groups whose answers all
    have the same reward then have a gradient too."""


class PPOStage(RolloutStage):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347): a linear layer on the model's hidden
    states learns what reward each token of an answer leads to, and tokens that lead to more than that become more
    likely. That layer is trained with the model and is not part of what the job hands back. `beta` weighs the
    divergence of each token as a part of its reward. As with TRL, a step has `per_device_train_batch_size` ·
    `gradient_accumulation_steps` answers, `num_generations` to a prompt."""

    type: Literal["ppo"] = "ppo"
    num_generations: Annotated[int, Field(ge=1, le=1024)] = 1
    """Answers to each prompt. They are not compared with one another."""
    num_iterations: Annotated[int, Field(ge=1, le=100)] = 4
    """Optimizer steps over the same answers. Values, returns and advantages are those before the first of them."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token that it is away."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation (arXiv:1506.02438): 1 takes the rewards as they came, 0 only the value
    of the next token."""
    epsilon: Annotated[float, Field(gt=0, le=100)] = 0.2
    """How far the ratio to the probability at the draw may fall (and rise) before its gradient is cut off."""
    epsilon_high: Annotated[float, Field(gt=0, le=100)] | None = None
    """How far it may rise. Default: `epsilon`."""
    epsilon_value: Annotated[float, Field(gt=0, le=100_000)] = 0.2
    """How far a value may move from that before the first step over the same answers."""
    value_coef: Annotated[float, Field(ge=0, le=1000)] = 0.1
    """Weight of the loss of the values."""
    whiten_advantages: bool = True
    """Move the advantages of all tokens of a step to mean 0 and standard deviation 1. Returns stay as they are."""


LearnsFromAnswers = GRPO | RLOO | PPOStage
"""The stages of this module."""

ONLY_LEARNING = frozenset(
    {"beta", "num_iterations", "loss", "epsilon", "epsilon_high", "epsilon_value", "scale_rewards", "gamma", "lam"}
    | {"value_coef", "whiten_advantages", "eval_temperature", "num_generations_eval", "slots", "force"}
)
"""Fields that decide what is learned from answers, or how they are made, and neither the answers to the prompts of
training nor whether those of a group differ. A trial of rewards holds for any values of them."""
