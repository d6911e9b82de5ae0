"""Variable-length attention by libraries beside PyTorch (core/hardware/tables/attention.py)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from core.hardware.tables.attention import LIBRARIES


class LibraryMissing(ImportError):
    """The library is not installed."""


def varlen_by(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    scaling: float | None,
) -> Tensor:
    """Causal attention of rows end to end, by the library of this name: query [tokens, heads, width], key and value
    with their own heads and tokens; the answer [tokens, heads, width]. `queries`, `keys`: where rows begin, int32 [rows
    + 1], and tokens of the longest. A row with more keys than queries: its queries are its last tokens. The gradients
    are summed up in a fixed order. LibraryMissing; or whatever the library raises."""
    module = next(row.module for row in LIBRARIES if row.name == name)
    try:
        library: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, and something that it needs is not
        raise LibraryMissing(f"{name} is not installed on this node") from error
    found = library.flash_attn_varlen_func(
        query, key, value, queries[0], keys[0], queries[1], keys[1],
        softmax_scale=scaling, causal=True, deterministic=True,
    )  # fmt: skip
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out
