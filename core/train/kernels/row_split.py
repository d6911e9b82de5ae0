"""Products of few enough rows at once, for cards whose libraries compute larger ones wrongly.

The rows of a product do not depend on one another: y = x·Wᵀ made of some rows at a time is y, and so are its gradients,
that of W as a sum over the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.hardware.tables.faults import Limits
from core.train.kernels.autograd import Member, lora_linears

TILE = 256
"""Rows of a tile of a product; a part that is larger is a multiple of it."""


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Splits the rows of a layer's products so that each stays within `limits`."""

    limits: Limits
    width: int
    """Columns of the widest matrix with a row for each row of the input that the layer makes, forwards or backwards."""

    def at_once(self, dtype: torch.dtype) -> int | None:
        """Largest number of rows of a product in `dtype`; None: no limit."""
        most = []
        if self.limits.fp32_rows is not None and dtype is torch.float32:
            most.append(self.limits.fp32_rows)
        if self.limits.output_bytes is not None:
            most.append(self.limits.output_bytes // (self.width * dtype.itemsize))
        return max(1, min(most) // TILE * TILE or min(most)) if most else None

    def of(self, x: Tensor) -> list[slice] | None:
        """The ranges of rows of x [..., K]; None: one product takes them all."""
        auto = torch.is_autocast_enabled(x.device.type)
        at_once = self.at_once(torch.get_autocast_dtype(x.device.type) if auto else x.dtype)
        rows = x.shape[:-1].numel()
        if at_once is None or rows <= at_once:
            return None
        return [slice(at, at + at_once) for at in range(0, rows, at_once)]

    def call(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """layer(x) [..., N] of x [..., K], for a layer that takes each row by itself."""
        parts = self.of(x)
        if parts is None:
            return layer(x)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.cat([layer(rows[part]) for part in parts])
        return y.view(*x.shape[:-1], y.shape[-1])

    def lora(self, x: Tensor, members: Sequence[Member]) -> list[Tensor]:
        """`lora_linears`; what dropout has made of the input is cut as the input is."""
        parts = self.of(x)
        if parts is None:
            return lora_linears(x, members)
        rows = x.reshape(-1, x.shape[-1])
        found = [lora_linears(rows[part], [_of(member, part) for member in members]) for part in parts]
        return [torch.cat(ys).view(*x.shape[:-1], ys[0].shape[-1]) for ys in zip(*found, strict=True)]


def _of(member: Member, part: slice) -> Member:
    if member.dropped is None:
        return member
    return replace(member, dropped=member.dropped.reshape(-1, member.dropped.shape[-1])[part])
