"""The method axis: which parameters are trained, and how."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from core.spec.base import SpecModel, by_type, short_form

ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,128}$")]


LayerRange = Annotated[str, StringConstraints(pattern=r"^(first|last) [1-9][0-9]{0,4}$")]
LayerNumber = Annotated[int, Field(ge=0, le=99_999)]


class TrainedPart(SpecModel):
    """The parameters that full fine-tuning trains; all others are frozen."""

    layers: Literal["all", "none"] | LayerRange | Annotated[list[LayerNumber], Field(min_length=1, max_length=1024)] = (
        "all"
    )
    """`all`, `none`, `first N`, `last N`, or a list of the layers' numbers from 0."""
    embeddings: bool = False
    """Train the embeddings too. Of a model whose output head is its embedding, this is the head as well."""
    head: bool = False
    """Train the output head too."""
    norms: bool = False
    """Train all norms, those of frozen layers and the last one too."""

    @model_validator(mode="after")
    def _something(self) -> TrainedPart:
        if self.layers == "none" and not (self.embeddings or self.head or self.norms):
            raise ValueError("nothing would be trained: name layers, or set `embeddings`, `head` or `norms`")
        return self


class Full(SpecModel):
    """Full fine-tuning: all parameters are trained, or those of some layers."""

    type: Literal["full"] = "full"
    train: TrainedPart | None = Field(default=None)
    """The part of the model to train. Default: all of it."""


def _distinct(tokens: list[str]) -> list[str]:
    for token in tokens:
        if token != token.strip():
            raise ValueError(f"{token!r} begins or ends with white space")
        if tokens.count(token) > 1:
            raise ValueError(f"`{token}` is there twice")
    return tokens


NewToken = Annotated[str, StringConstraints(min_length=2, max_length=64)]
NewTokens = Annotated[list[NewToken], Field(max_length=512), AfterValidator(_distinct)]

Targets = Literal["all-linear", "attention"] | Annotated[list[ModuleName], Field(min_length=1, max_length=64)]


class Adapter(SpecModel):
    """Common fields of adapters; not an arm."""

    type: str
    target_modules: Targets = "all-linear"
    """`all-linear` (every linear layer except the head), `attention` (its projections), or a list of module names."""
    modules_to_save: Annotated[list[ModuleName], Field(max_length=64)] = Field(default=[])
    """Modules whose weights are trained whole, in float32, and handed back with the adapter: `lm_head`,
    `embed_tokens`, norms, or any other module whose weights are not packed. Full names, or their last part. They get no
    adapter."""

    def handed_back(self) -> Self:
        """The method that the adapter handed back is one of."""
        return self


MAX_RANK = 256
RandomisedPiSSA = Annotated[str, StringConstraints(pattern=r"^pissa_niter_[1-9][0-9]?$")]


class LowRank(Adapter):
    """Common fields of LoRA and QLoRA; not an arm."""

    r: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    """Rank of the update."""
    lora_alpha: Annotated[float, Field(gt=0, le=4096)] | None = None
    """The update is scaled by lora_alpha / r. Default: 2 r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (arXiv:2312.03732)."""
    use_dora: bool = False
    """DoRA: a trained magnitude beside the low-rank direction (arXiv:2402.09353)."""
    init_lora_weights: Literal["default", "pissa", "olora"] | RandomisedPiSSA = "default"
    """Where the adapter begins. `default`: A is random and B is zero. `pissa`: the largest singular directions of each
    weight (arXiv:2404.02948), and `pissa_niter_N` an approximation of these by N iterations. `olora`: the first
    directions of its QR decomposition (arXiv:2406.01775). What an adapter begins with is subtracted from its output, so
    that the base keeps its weights; the adapter that is handed back has rank 2 r, and `r` is at most 128."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1, le=1024)] | None = None
    """LoRA+: factor of the learning rate of the B matrices, with any optimizer (arXiv:2402.12354 recommends 16).
    Magnitudes of DoRA have it too. Default: 1."""
    new_tokens: NewTokens = Field(default=[])
    """Tokens that are added to the tokenizer, as text. Their rows of the embedding and of the output head are trained,
    and all other rows stay frozen."""

    @model_validator(mode="after")
    def _begins_anywhere(self) -> Self:
        if self.init_lora_weights == "default":
            return self
        if self.lora_dropout:
            raise ValueError(
                f"`init_lora_weights: {self.init_lora_weights}` puts a part of the base's weights into the adapter, "
                "and `lora_dropout` would drop that: set it to 0"
            )
        if self.use_dora:
            raise ValueError(
                f"`init_lora_weights: {self.init_lora_weights}` and `use_dora` each begin from the base's weights in "
                "another way: remove one of them"
            )
        if self.r > MAX_RANK // 2:
            raise ValueError(
                f"with `init_lora_weights: {self.init_lora_weights}` the exported adapter has twice the "
                f"rank, which may be no more than {MAX_RANK}: set `r` to at most {MAX_RANK // 2}"
            )
        return self

    @property
    def started(self) -> bool:
        """Whether the adapter begins with a part of the base's weights."""
        return self.init_lora_weights != "default"

    @property
    def computed_rank(self) -> int:
        """Rank of the products, and of the adapter that is handed back."""
        return 2 * self.r if self.started else self.r

    def handed_back(self) -> Self:
        """The method that the adapter handed back is one of: twice the rank, where it began elsewhere."""
        if not self.started:
            return self
        factor = math.sqrt(2) if self.use_rslora else 2.0
        alpha = None if self.lora_alpha is None else self.lora_alpha * factor
        return self.model_copy(update={"r": 2 * self.r, "lora_alpha": alpha, "init_lora_weights": "default"})


class LoRA(LowRank):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"


class QLoRA(LowRank):
    """LoRA over a 4-bit base (Dettmers et al. 2023, arXiv:2305.14314); `quantization` defaults to `nf4`."""

    type: Literal["qlora"] = "qlora"


class OFT(Adapter):
    """Orthogonal fine-tuning: the input of each linear layer is rotated, block by block (Qiu et al. 2023,
    arXiv:2306.07280; with rotated inputs arXiv:2506.19847). The base may be packed."""

    type: Literal["oft"] = "oft"
    oft_block_size: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Width of a block; it must divide the inputs of each layer. Default: 32, unless `r` is given."""
    r: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of blocks of each layer, in place of `oft_block_size`."""
    use_cayley_neumann: bool = True
    """Approximate the rotation by five terms of a series. `false`: the exact Cayley transform, which solves a system
    for each block."""

    @model_validator(mode="after")
    def _one_size(self) -> OFT:
        if self.oft_block_size is not None and self.r is not None:
            raise ValueError("`oft_block_size` and `r` are two ways to say one thing: give one of them")
        return self

    def block_of(self, inputs: int) -> int | None:
        """Width of the blocks of a layer with so many inputs; None: they cannot be divided so."""
        size = self.oft_block_size or 32 if self.r is None else inputs // self.r
        count = inputs // size if size else 0
        return size if size > 1 and count * size == inputs and self.r in (None, count) else None


class Auto(LowRank):
    """The first of these methods that fits the slot on which the job starts: `full`, `lora`, `lora` over int8, `qlora`,
    and `qlora` with streamed blocks. It is chosen once, at the job's first start, from its memory plan (docs/plans.md),
    and does not change afterwards. The job shows why each earlier candidate was rejected. `full` ignores the fields
    below."""

    type: Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _adds_no_tokens(self) -> Auto:
        if self.new_tokens:
            raise ValueError("`new_tokens` needs an adapter, and `auto` may choose `full`: name the method")
        return self


Method = Annotated[Full | LoRA | QLoRA | OFT | Auto, Field(discriminator="type"), short_form(by_type)]
SettledMethod = Full | LoRA | QLoRA | OFT
"""What a run has."""
