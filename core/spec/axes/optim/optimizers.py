"""Arms of the optimizer axis: how gradients become updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from core.spec.base import SpecModel

Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=10)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, le=10)]


class GroupFactors(SpecModel):
    """Parameters that share factors of the learning rate and of the weight decay."""

    pattern: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*?\[\]!-]{1,256}$")]
    """Shell pattern of names as the model's files have them, e.g. `*.embed_tokens.*`, or as an adapter's has them, e.g.
    `*.lora_B.weight`. It must match a trained parameter."""
    learning_rate_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the learning rate."""
    weight_decay_factor: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Factor of the weight decay."""


ParameterGroups = Annotated[list[GroupFactors], Field(max_length=64)]


class Decoupled(SpecModel):
    """Common fields of optimizers whose weight decay is apart from the gradient; not an arm."""

    type: str
    learning_rate: Rate | None = None
    """Peak learning rate. Default: 2e-4 with adapters, 2e-5 for full fine-tuning (with `method: auto`, that of the
    chosen method)."""
    weight_decay: Decay = 0.0
    """Decoupled decay; biases and norms are exempt."""
    parameter_groups: ParameterGroups = Field(default=[])
    """Groups with a learning rate and weight decay of their own. A parameter is in the first one that matches."""


class AdamW(Decoupled):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    type: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)  # a list, as JSON has no tuples
    """Decay of the running means of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class AdamW8bit(AdamW):
    """AdamW with both means in 8 bits (Dettmers et al. 2021, arXiv:2110.02861): blocks of 256 values share a scale.
    Tensors of fewer than 4096 parameters keep theirs in float32."""

    type: Literal["adamw_8bit"] = "adamw_8bit"  # type: ignore[assignment]


class AdamW4bit(AdamW):
    """AdamW with both means in 4 bits (Li et al. 2023, arXiv:2309.01507): blocks of 128 values share a scale. Tensors
    of fewer than 4096 parameters keep theirs in float32."""

    type: Literal["adamw_4bit"] = "adamw_4bit"  # type: ignore[assignment]


class AdEMAMix(Decoupled):
    """AdamW with a second, slow mean of the gradient (Pagliardini et al. 2024, arXiv:2409.03137)."""

    type: Literal["ademamix"] = "ademamix"
    betas: Annotated[tuple[Beta, Beta, Beta], Field(strict=False)] = (0.9, 0.999, 0.9999)
    """Decay of the running means: of the gradient, of its square, and the slow one of the gradient."""
    alpha: Annotated[float, Field(ge=0, le=1000)] = 5.0
    """Weight of the slow mean in the update."""
    warmup_steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Optimizer steps over which `alpha` rises from 0, and the slow mean's decay from the first of `betas`."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""


class Lion(Decoupled):
    """Lion: the sign of a mean of the gradient (Chen et al. 2023, arXiv:2302.06675)."""

    type: Literal["lion"] = "lion"
    learning_rate: Rate | None = None
    """Peak learning rate. Default: a tenth of that of `adamw`, since every parameter moves by the whole rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.99)
    """Decay of the mean in the update, and of the mean that is kept."""


class Muon(Decoupled):
    """Muon: orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024; torch.optim.Muon). AdamW
    updates the rest: embeddings, output head, norms and biases."""

    type: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Newton-Schulz iterations."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a matrix's learning rate by its shape. `match_rms_adamw` gives updates of the size of AdamW's, so that
    one learning rate suits both (arXiv:2502.16982)."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's, for the rest."""
    eps: Epsilon = 1e-8
    """AdamW's, for the rest."""


class Adafactor(Decoupled):
    """Adafactor: the mean of the squared gradient by rows and columns, no mean of the gradient (Shazeer and Stern 2018,
    arXiv:1804.04235; torch.optim.Adafactor)."""

    type: Literal["adafactor"] = "adafactor"
    learning_rate: Rate | None = None
    """Peak learning rate relative to the size of each parameter. Default: 1e-2."""
    beta2_decay: Annotated[float, Field(ge=-10, lt=0)] = -0.8
    """Exponent of the step by which the mean of squares forgets."""
    eps: Annotated[tuple[Epsilon, Epsilon], Field(strict=False)] = (1.1920928955078125e-07, 1e-3)
    """Lower bounds of the denominator and of a parameter's size."""
    clip_threshold: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Maximum root mean square of an update before the learning rate."""


class AdaLomo(Decoupled):
    """AdaLomo: means of squares by rows and columns, and updates of the size of what they change (Lv et al. 2023,
    arXiv:2310.10195). The step follows the backward and is not part of it, so that clipping and accumulation work."""

    type: Literal["adalomo"] = "adalomo"
    learning_rate: Rate | None = None
    """Peak learning rate relative to the size of each parameter. Default: 5e-4 for full fine-tuning, 5e-3 with
    adapters."""
    decay_rate: Annotated[float, Field(ge=-10, lt=0)] = -0.8
    """Exponent of the step by which the means forget."""
    eps: Epsilon = 1e-3
    """Least size of a parameter."""
    clip_threshold: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Maximum root mean square of an update before the learning rate."""


class Projected(Decoupled):
    """Common fields of AdamW over projected gradients; not an arm."""

    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""
    update_proj_gap: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Steps between two projections."""


class GaLore(Projected):
    """GaLore: AdamW's means of the gradient's largest singular directions (Zhao et al. 2024, arXiv:2403.03507), for
    matrices of hidden layers that are wider than `rank`; AdamW for the rest."""

    type: Literal["galore"] = "galore"
    learning_rate: Rate | None = None
    """Peak learning rate. Default: four times that of `adamw`, which `scale` takes back."""
    rank: Annotated[int, Field(ge=1, le=8192)] = 128
    """Singular directions that are kept."""
    scale: Annotated[float, Field(gt=0, le=1000)] = 0.25
    """Factor of the updates of projected matrices."""


class Apollo(Projected):
    """APOLLO: each column of the gradient scaled as AdamW scales its random projection (Zhu et al. 2024,
    arXiv:2412.05270), for matrices of hidden layers that are wider than `rank`; AdamW for the rest."""

    type: Literal["apollo"] = "apollo"
    rank: Annotated[int, Field(ge=1, le=8192)] = 256
    """Dimensions of the projection."""
    scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the updates of projected matrices."""


class ApolloMini(Projected):
    """APOLLO-Mini: one scale for each matrix, from a projection of one dimension (arXiv:2412.05270)."""

    type: Literal["apollo_mini"] = "apollo_mini"
    scale: Annotated[float, Field(gt=0, le=1000)] = 11.313708498984761
    """Factor of the updates of projected matrices. Default: the square root of 128."""


BlockOrder = Literal["random", "ascending", "descending"]


class BAdam(Decoupled):
    """BAdam: AdamW over one block of the model at a time (Luo et al. 2024, arXiv:2404.02827). Each layer is a block,
    and what is outside of the layers is one more. Only the block whose turn it is has gradients and means."""

    type: Literal["badam"] = "badam"
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""
    switch_block_every: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Optimizer steps of a block's turn. Its means begin at zero with each turn."""
    switch_mode: BlockOrder = "random"
    """Order of the blocks. `random`: another order each time that all blocks had their turn, the same in every run.
    `ascending`: the first layer first, what is outside of the layers last."""


class SophiaG(Decoupled):
    """Sophia-G: a mean of the gradient over an estimate of the curvature, clipped (Liu et al. 2023, arXiv:2305.14342).
    The estimate takes one more pass over the first batch of every `update_period`-th step, with labels that the model
    draws itself."""

    type: Literal["sophia_g"] = "sophia_g"
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.965, 0.99)
    """Decay of the running means of the gradient and of the curvature."""
    rho: Annotated[float, Field(gt=0, le=1000)] = 0.04
    """Factor of the curvature in the denominator; the smaller, the more of the update is clipped."""
    eps: Epsilon = 1e-12
    """Least denominator."""
    update_period: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimizer steps between two estimates of the curvature."""


class SGD(SpecModel):
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    type: Literal["sgd"] = "sgd"
    learning_rate: Rate | None = None
    """Peak learning rate. Default: 1e-2."""
    weight_decay: Decay = 0.0
    """Added to the gradient, times the weights; biases and norms are exempt."""
    momentum: Beta = 0.9
    """Decay of the momentum; 0 keeps none."""
    nesterov: bool = False
    """Nesterov momentum; needs `momentum`."""
    parameter_groups: ParameterGroups = Field(default=[])
    """Groups with a learning rate and weight decay of their own. A parameter is in the first one that matches."""

    @model_validator(mode="after")
    def _has_momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("`nesterov` needs `momentum` above 0")
        return self
