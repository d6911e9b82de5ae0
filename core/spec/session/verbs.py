"""Operations of a session: what a caller asks, without its tensors. `core/train/session` computes them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, TypeAdapter, model_validator

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW, Optimizer
from core.spec.base import SpecModel
from core.spec.session.losses import CrossEntropy, SessionLoss
from core.spec.session.method import SessionMethod

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
CheckpointName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Folder = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_NEW_TOKENS = 1 << 20
MOST_LIKELIEST = 100
"""Likeliest tokens of a place that can be asked for."""


class OfModel(SpecModel):
    """Common field of operations on one adapter; not an arm."""

    model: ModelName
    """Name of the adapter within the session."""


class CreateModel(OfModel):
    """Add an adapter to the base, with an optimizer, a gradient window and a random state of its own."""

    op: Literal["create"] = "create"
    method: SessionMethod = LoRA()
    """The adapter, which goes over whatever format the base has; `full` in a session that was opened with it: the model
    itself."""
    optimizer: Optimizer = AdamW()
    """The optimizer; its learning rate is given with each step."""
    seed: Seed = 0
    """Seed of the initial weights and of dropout."""


class LoadModel(OfModel):
    """Put saved weights in the place of an adapter's, or make a new adapter of them."""

    op: Literal["load"] = "load"
    folder: Folder
    """Folder of an adapter in PEFT's form: one that `save` made, or one from elsewhere."""
    optimizer: Optimizer = AdamW()
    """The optimizer of a new adapter."""
    with_optimizer: bool = False
    """Restore the state of optimizer, gradient window and dropout too, as `save` has written it."""
    seed: Seed = 0
    """Seed of dropout."""


class DropModel(OfModel):
    """Remove an adapter and all that it holds."""

    op: Literal["drop"] = "drop"


class Forward(OfModel):
    """Compute log-probabilities and loss without gradients and dropout."""

    op: Literal["forward"] = "forward"
    loss: SessionLoss = CrossEntropy()


class ForwardBackward(OfModel):
    """Compute the loss and add its gradients to the window."""

    op: Literal["forward_backward"] = "forward_backward"
    loss: SessionLoss = CrossEntropy()


class OptimStep(OfModel):
    """Update the weights by the gradients of the window, and drop these."""

    op: Literal["step"] = "step"
    learning_rate: Annotated[float, Field(ge=0, le=1e3)]
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the global L2 norm of the gradients; null: do not clip."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] | None = None
    """Weight decay of this step; null: that of the optimizer."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = None
    """Betas of this step, for optimizers that have two; null: those of the optimizer."""
    eps: Annotated[float, Field(gt=0, le=1)] | None = None
    """Epsilon of this step; null: that of the optimizer."""


class ZeroGrad(OfModel):
    """Drop the gradients of the window."""

    op: Literal["zero_grad"] = "zero_grad"


class OfModelOrBase(SpecModel):
    """Common field of operations that change nothing; not an arm."""

    model: ModelName | None = None
    """Name of the adapter; null: the base alone."""
    folder: Folder | None = None
    """Folder of a saved adapter, used in the place of `model`."""

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.model is not None and self.folder is not None:
            raise ValueError("an operation takes either `model` or `folder`")
        return self


class Generate(OfModelOrBase):
    """Answer prompts (`tokens`), each `num_samples` times. With `targets` [tokens, choices], also the log-probability
    of each of them behind its token of the prompts, 0 for one below 0."""

    op: Literal["generate"] = "generate"
    max_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)]
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=16)] = (
        Field(default=[])
    )
    """Text that ends an answer; the answer has it."""
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    """Tokens that end an answer; null: the tokenizer's end of sequence."""
    seed: Seed = 0
    prompt_logprobs: bool = False
    """Return the log-probability of each token of the prompts, as `logprobs` does."""
    prompt_top: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] = 0
    """Return the likeliest tokens in the place of each token of the prompts, so many, with their log-probabilities."""
    prompt_last: Annotated[int, Field(ge=1)] | None = None
    """Look so at the last tokens of each prompt only, so many; null: at all but the first."""
    sample_top: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] = 0
    """Return the likeliest tokens in the place of each token of the answers, so many, with their log-probabilities at
    the temperature of the draw."""


class Logprobs(OfModelOrBase):
    """Compute the log-probability of each target."""

    op: Literal["logprobs"] = "logprobs"


class Save(OfModel):
    """Write adapter, optimizer and window below the session: a folder in PEFT's form."""

    op: Literal["save"] = "save"
    name: CheckpointName


Verbs = (
    CreateModel | LoadModel | DropModel | Forward | ForwardBackward | OptimStep | ZeroGrad | Generate | Logprobs | Save
)
Operation = Annotated[Verbs, Field(discriminator="op")]
OPERATION: TypeAdapter[Verbs] = TypeAdapter(Operation)

READ_ONLY = frozenset({"forward", "generate", "logprobs"})
"""Operations that leave no trace: they need not be replayed."""
