"""The quantization axis: how frozen weights are stored."""

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


Quantization = Annotated[NoQuantization | NF4 | Int8, Field(discriminator="type"), short_form(by_type)]
