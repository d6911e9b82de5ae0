"""Keys and values of one forward pass for the next: rows that begin as those of the pass before do not compute that
beginning again.

Within `keeping` each call of packed attention leaves its keys and values here, without gradients; within `continuing`
the same calls, in the same order, find those of the pass before in front of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Kept = list[tuple[Tensor, Tensor]]
"""Keys and values [1, heads, tokens, width] of each call of attention."""

_into: ContextVar[Kept | None] = ContextVar("into", default=None)
_out_of: ContextVar[Iterator[tuple[Tensor, Tensor]] | None] = ContextVar("out_of", default=None)


@contextmanager
def keeping() -> Iterator[Kept]:
    """Around the first pass: what it leaves."""
    kept: Kept = []
    token = _into.set(kept)
    try:
        yield kept
    finally:
        _into.reset(token)


@contextmanager
def continuing(kept: Kept) -> Iterator[None]:
    """Around the second pass."""
    token = _out_of.set(iter(kept))
    try:
        yield
    finally:
        _out_of.reset(token)


def with_kept(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a call behind those that were kept for it, if there are any."""
    if (into := _into.get()) is not None:
        into.append((key.detach(), value.detach()))
    if (out_of := _out_of.get()) is None:
        return key, value
    keys, values = next(out_of)
    return torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
