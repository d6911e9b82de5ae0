"""Fused experts that lie in files: a mixture is read, merged and written in constant memory.

The weights of a model are mapped from its files and take no memory of their own. But transformers fuses the experts of
each layer while it reads them, and these copies are nearly all of a mixture. Here they are in files without a name, so
that the kernel can write them out when it needs the memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST_BYTES = 1 << 20
"""What is smaller stays in memory."""
JOINS = (torch.stack, torch.cat)
"""Functions by which experts are fused."""


class FusedInFiles(TorchFunctionMode):
    """Within, large tensors that are stacked or concatenated in this thread lie in files below a folder. OSError where
    the disk has no room for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in JOINS or "out" in kwargs or not _joins_weights(args[0]):
            return func(*args, **kwargs)
        shape = func([tensor.to("meta") for tensor in args[0]], *args[1:], **kwargs).shape
        return func(*args, **kwargs, out=self._empty(shape, args[0][0].dtype))

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with NamedTemporaryFile(dir=self._folder, prefix=".fused-") as file:  # the mapping outlives the name
            os.posix_fallocate(file.fileno(), 0, shape.numel() * dtype.itemsize)  # a full disk is no SIGBUS later on
            return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype).view(shape)


def _joins_weights(tensors: Sequence[Tensor]) -> bool:
    return (
        sum(tensor.nbytes for tensor in tensors) >= LEAST_BYTES
        and len({tensor.dtype for tensor in tensors}) == 1
        and not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in tensors)
    )
