"""One compiled form of a kernel: what the just-in-time compiler derives from the arguments of a launch, written down, so
that a machine without a GPU can compile the same code object and look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Wave = Literal[32, 64]
"""Lanes that run together: 64 on gfx9 (GCN, CDNA), 32 on gfx10 and later (RDNA) and on NVIDIA."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    """Unique among all cases; the row's name in the table of compiled kernels."""
    fn: Any
    """The function that `triton.jit` made."""
    signature: Mapping[str, str]
    """Parameter to type ("*bf16", "i32", "constexpr"), all of them, in order."""
    constexprs: Mapping[str, Any]
    aligned: frozenset[str]
    """Parameters that a launch finds to be multiples of 16: addresses of torch's allocator, most sizes."""
    options: Mapping[str, Any]
    """num_warps, num_stages, enable_fp_fusion: as the launch passes them."""

    def attrs(self, platform: Literal["hip", "cuda"]) -> dict[tuple[int, ...], list[list[Any]]]:
        """What `triton.compiler.ASTSource` takes. On hip a pointer into less than 2 GiB is marked as such, and loads
        through it become buffer loads; every case is about tensors that small."""
        found: dict[tuple[int, ...], list[list[Any]]] = {}
        for at, (name, kind) in enumerate(self.signature.items()):
            marks: list[list[Any]] = [["tt.divisibility", 16]] if name in self.aligned else []
            if platform == "hip" and kind.startswith("*"):
                marks.append(["tt.pointer_range", 32])
            if marks:
                found[(at,)] = marks
        return found
