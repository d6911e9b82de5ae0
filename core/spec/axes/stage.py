"""The stage axis: what is learned from a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from core.spec.axes.data import RowFormat
from core.spec.axes.rollout.stages import GRPO, RLOO, PPOStage
from core.spec.base import SpecModel, by_type, short_form

LossOn = Literal["completions", "last", "turns", "all"]
Better = Literal["lower", "higher"]
Head = Literal["tokens", "score", "labels"]
"""Output of a model: logits of the next token, one score of a sequence, or logits of labels at a token."""


class SFT(SpecModel):
    """Supervised fine-tuning: cross-entropy on the tokens that the model learns to write."""

    rows: ClassVar[tuple[RowFormat, ...]] = ("messages", "sharegpt", "prompt_completion", "instruction", "text")
    """Formats of the rows that the stage learns from."""
    sequences: ClassVar[int] = 1
    """Sequences of each row that go through the model together in training."""
    type: Literal["sft"] = "sft"
    metrics: ClassVar[Mapping[str, Better]] = {
        "eval_loss": "lower",
        "eval_perplexity": "lower",
        "eval_exact_match": "higher",
    }
    """Held-out metrics that may decide which evaluation is best."""
    head: ClassVar[Head] = "tokens"
    """Output head of the model that the stage trains."""
    loss_on: LossOn | None = None
    """Tokens with a loss. `completions`: those of every assistant turn whose `weight` is not 0; prompts have none.
    `last`: those of the last assistant turn. `turns`: those of turns with `weight: 1`. `all`: every token. Default:
    `completions`, or `all` for raw text, which has no prompt."""
    loss: Literal["nll", "dft"] = "nll"
    """Loss of a token with probability p. `nll`: -log p. `dft` (dynamic fine-tuning, arXiv:2508.05629): -p · log p with
    p as a constant factor, which gives less weight to tokens that the model finds improbable."""


class CPT(SpecModel):
    """Continued pre-training on raw text: cross-entropy on every token of a document, its end token included. Defaults
    of the job: `batching: packed`, `training.truncation: split` and one epoch."""

    type: Literal["cpt"] = "cpt"
    rows: ClassVar[tuple[RowFormat, ...]] = ("text",)
    sequences: ClassVar[int] = 1
    metrics: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_perplexity": "lower"}
    head: ClassVar[Head] = "tokens"
    across: bool = False
    """Join all documents, with an end token behind each, and cut the result into rows of training.max_length, as most
    pre-training scripts do: no row is short, and tokens attend to the documents before theirs. By default only
    documents longer than max_length are cut, and no token attends to another document."""


class PairStage(SpecModel):
    """Common fields of the stages that learn from pairs of answers; not an arm."""

    type: str
    rows: ClassVar[tuple[RowFormat, ...]] = ("preference",)
    sequences: ClassVar[int] = 2
    metrics: ClassVar[Mapping[str, Better]] = {
        "eval_loss": "lower",
        "eval_rewards/accuracies": "higher",
        "eval_rewards/margins": "higher",
    }
    head: ClassVar[Head] = "tokens"


class DPO(PairStage):
    """Direct preference optimization: the chosen answer of a pair becomes more likely than the rejected one, measured
    against the model that training starts from (Rafailov et al. 2023, arXiv:2305.18290)."""

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "kto_pair"] = "sigmoid"
    """`sigmoid` as in the paper; `hinge` (SLiC, arXiv:2305.10425); `ipo` over the mean log-probability of a token
    (arXiv:2310.12036); `robust` for pairs of which `label_smoothing` are the wrong way round (arXiv:2403.00409);
    `kto_pair`, the KTO loss over both answers (arXiv:2402.01306)."""
    beta: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Strength of the pull towards the starting model; for `ipo`, tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are assumed to be labelled the wrong way round; `sigmoid` and `robust` use it."""
    nll_weight: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of an additional cross-entropy on the chosen answers, per token (the `sft` term of TRL; RPO,
    arXiv:2404.19733)."""

    @model_validator(mode="after")
    def _smoothing_used(self) -> DPO:
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"`label_smoothing` has no meaning for `loss: {self.loss}`; use `sigmoid` or `robust`")
        return self


class SimPO(PairStage):
    """Simple preference optimization: like DPO over the mean log-probability of a token, without a reference (Meng et
    al. 2024, arXiv:2405.14734)."""

    type: Literal["simpo"] = "simpo"
    beta: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Scale of the rewards."""
    gamma: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Margin by which the chosen reward should exceed the rejected one."""


class ORPO(PairStage):
    """Odds ratio preference optimization: cross-entropy on the chosen answer with its prompt, and the odds ratio of the
    two answers, without a reference (Hong et al. 2024, arXiv:2403.07691)."""

    type: Literal["orpo"] = "orpo"
    beta: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Weight of the odds ratio (the paper's lambda)."""


class KTO(SpecModel):
    """Kahneman-Tversky optimization: learns from single answers that are labelled good or bad (Ethayarajh et al. 2024,
    arXiv:2402.01306)."""

    type: Literal["kto"] = "kto"
    rows: ClassVar[tuple[RowFormat, ...]] = ("kto",)
    sequences: ClassVar[int] = 1
    metrics: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_rewards/margins": "higher"}
    head: ClassVar[Head] = "tokens"
    beta: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Strength of the pull towards the starting model."""
    desirable_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of the good answers. With many more bad than good ones, raise it: weight times count should be about as
    large for both kinds (up to 4/3 as large for the good ones)."""
    undesirable_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of the bad answers."""


class Reward(SpecModel):
    """Reward model: a score for a whole answer, larger for the chosen one of a pair. A new output head replaces the
    model's own and computes one number at the last token (Ouyang et al. 2022, arXiv:2203.02155)."""

    type: Literal["reward"] = "reward"
    rows: ClassVar[tuple[RowFormat, ...]] = ("preference",)
    sequences: ClassVar[int] = 2
    metrics: ClassVar[Mapping[str, Better]] = {
        "eval_loss": "lower",
        "eval_accuracy": "higher",
        "eval_margin": "higher",
    }
    head: ClassVar[Head] = "score"
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the square of the sum of both scores, which keeps scores near 0 (Eisenstein et al. 2023,
    arXiv:2312.09244); 0.01 is usual."""


class ProcessReward(SpecModel):
    """Process reward model: judges each step of a solution. A new output head replaces the model's own and decides
    between right and wrong at the separator behind each step (Lightman et al. 2023, arXiv:2305.20050)."""

    type: Literal["process_reward"] = "process_reward"
    rows: ClassVar[tuple[RowFormat, ...]] = ("stepwise",)
    sequences: ClassVar[int] = 1
    metrics: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_accuracy": "higher", "eval_f1": "higher"}
    head: ClassVar[Head] = "labels"
    last_step_only: bool = False
    """Learn from the last step of each solution only: an outcome reward model."""


Stage = Annotated[
    SFT | CPT | DPO | SimPO | ORPO | KTO | Reward | ProcessReward | GRPO | RLOO | PPOStage,
    Field(discriminator="type"),
    short_form(by_type),
]


def loss_on(stage: Stage) -> LossOn | None:
    """`loss_on` of a stage that has a choice of tokens; None: not chosen, or no choice."""
    return stage.loss_on if isinstance(stage, SFT) else None
