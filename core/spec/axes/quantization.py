"""The quantization axis: how frozen weights are stored, or for which format weights are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.axes.method import ModuleName
from core.spec.base import SpecModel, by_type, short_form

ModuleNames = Annotated[list[ModuleName], Field(max_length=64)]


class NoQuantization(SpecModel):
    """The weights of the base model's files: in the run's precision, or packed if the files are NF4."""

    type: Literal["none"] = "none"


class NF4(SpecModel):
    """4 bits per weight, in blocks of 64, in bitsandbytes' layout. Embeddings, output head and norms stay dense. A base
    whose files are NF4 is used unchanged."""

    type: Literal["nf4"] = "nf4"
    double: bool = True
    """Quantise the blocks' scales too: 4.13 bits per weight instead of 4.5."""
    skip_modules: ModuleNames = Field(default=[])
    """Linear layers that stay dense: full names, or their last part."""


class Int8(SpecModel):
    """8 bits per weight, with one scale (absmax) per block."""

    type: Literal["int8"] = "int8"
    block_size: Literal[32, 64, 128, 256] = 64
    """Weights per scale; 64 gives 8.5 bits per weight."""
    skip_modules: ModuleNames = Field(default=[])
    """As for `nf4`."""


class QAT(SpecModel):
    """Quantisation-aware training: in every pass the weights of linear layers, adapter included, are rounded to the
    numbers of `weights`, and their inputs to 8 bits for each token (arXiv:1712.05877). The trained weights are stored
    unrounded. `export: torchao_int8` or `torchao_int4` then writes the model that was trained. Embeddings, output head
    and norms stay as they are."""

    type: Literal["qat"] = "qat"
    weights: Literal["int8", "int4"] = "int8"
    """`int8`: one scale for each output. `int4`: one scale for `group_size` weights."""
    group_size: Literal[32, 64, 128] = 32
    """Weights per scale of `int4`. A layer whose number of inputs is no multiple of it is not rounded."""
    skip_modules: ModuleNames = Field(default=[])
    """Linear layers that are not rounded: full names, or their last part."""


FrozenFormat = Annotated[NoQuantization | NF4 | Int8, Field(discriminator="type"), short_form(by_type)]
"""How frozen weights are stored."""
Quantization = Annotated[NoQuantization | NF4 | Int8 | QAT, Field(discriminator="type"), short_form(by_type)]


def packing_of(quantization: Quantization | None) -> FrozenFormat | None:
    """How frozen weights lie in memory; None: as in their files, as for `qat`."""
    return None if isinstance(quantization, NoQuantization | QAT) else quantization
