"""Attention libraries beside PyTorch: which one is expected to compute on which architecture, best first.

A row only says what is tried. A library is used after the node's self-test compared its variable-length attention,
forward and backward, with the CPU's arithmetic on this card; none is a dependency, and none is installed by eft.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Library = Literal["flash_attn_3", "aiter", "flash_attn"]


@dataclass(frozen=True, slots=True)
class AttentionLibrary:
    """One library on the architectures that its authors name."""

    name: Library
    title: str
    module: str
    """The module with `flash_attn_varlen_func`."""
    arches: tuple[str, ...]
    install: str
    source: str


LIBRARIES = (
    AttentionLibrary(
        "flash_attn_3", "FlashAttention 3", "flash_attn_interface", ("sm_90",),
        "`hopper/` of the repository, CUDA 12.3 or newer", "https://github.com/Dao-AILab/flash-attention",
    ),
    AttentionLibrary(
        "aiter", "AITER", "aiter", ("gfx942", "gfx950"),
        "wheels of the releases, ROCm 7.0 or newer", "https://github.com/ROCm/aiter",
    ),
    AttentionLibrary(
        "flash_attn", "FlashAttention 2", "flash_attn", ("sm_80", "sm_86", "sm_89", "sm_90"),
        "`pip install flash-attn --no-build-isolation`", "https://github.com/Dao-AILab/flash-attention",
    ),
    AttentionLibrary(
        "flash_attn", "FlashAttention 2 over Composable Kernel", "flash_attn", ("gfx90a", "gfx942", "gfx950"),
        "`pip install flash-attn --no-build-isolation`, ROCm 6.0 or newer",
        "https://github.com/Dao-AILab/flash-attention",
    ),
)  # fmt: skip
"""Best first."""
CUDNN = frozenset({"sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"})
"""Architectures whose builds of PyTorch have cuDNN's attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
Its backward pass has no fixed order of sums, so nothing but `attention: cudnn` takes it."""


def libraries_for(arch: str, passed: Collection[str] | None = None) -> tuple[AttentionLibrary, ...]:
    """Rows of this architecture, best first; with `passed` those of the names in it alone."""
    return tuple(row for row in LIBRARIES if arch in row.arches and (passed is None or row.name in passed))
