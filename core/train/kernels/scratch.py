"""Where dequantised weights live for the moment of a matrix product: a few buffers a device, used again and again.

A weight just dequantised stays until its buffer is needed, so that gradient checkpointing, which runs a layer's forward
directly before its backward, dequantises once for both when one layer fits the budget.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.plan.constants import SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class _Entry:
    packed: Tensor
    """Kept, so that its address cannot come to stand for another weight."""
    version: int
    buffer: Tensor


class Scratch:
    """Dense copies of packed weights, least recently used first out. For one stream of work: see `scratch_for`."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: OrderedDict[tuple[int, torch.dtype], _Entry] = OrderedDict()
        self._free: list[Tensor] = []
        self.hits = 0
        self.misses = 0

    @property
    def nbytes(self) -> int:
        return sum(e.buffer.nbytes for e in self._entries.values()) + sum(b.nbytes for b in self._free)

    def dense(self, packed: Tensor, n: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """Flat [n] tensor that `fill` has filled for `packed`: valid until the next call, and not to be written."""
        key = (packed.data_ptr(), dtype)
        trusted = not packed.is_inference() and not _capturing(packed)
        entry = self._entries.get(key)
        if entry is not None and trusted and entry.version == packed._version and entry.buffer.numel() == n:
            self._entries.move_to_end(key)
            self.hits += 1
            return entry.buffer
        self.misses += 1
        if entry is not None:
            self._free.append(self._entries.pop(key).buffer)
        buffer = self._buffer(n, dtype, packed.device)
        fill(buffer)
        if trusted:
            self._entries[key] = _Entry(packed, packed._version, buffer)
        else:
            self._free.append(buffer)
        return buffer

    def _buffer(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        need = n * dtype.itemsize
        while True:
            for at, buffer in enumerate(self._free):
                if buffer.numel() == n and buffer.dtype == dtype:
                    return self._free.pop(at)
            if self.nbytes + need <= self.budget or not self._entries:
                break
            self._free.append(self._entries.popitem(last=False)[1].buffer)
            self._trim(need, keep=(n, dtype))
        self._trim(need, keep=(n, dtype))
        return torch.empty(n, dtype=dtype, device=device)

    def _trim(self, need: int, keep: tuple[int, torch.dtype]) -> None:
        while self._free and self.nbytes + need > self.budget:
            if (self._free[0].numel(), self._free[0].dtype) == keep:
                return
            self._free.pop(0)

    def clear(self) -> None:
        """Give all memory back."""
        self._entries.clear()
        self._free.clear()


_local = threading.local()
_streams: dict[tuple[str, int | None, int], Scratch] = {}
_gpu_budgets: dict[int, int] = {}


def scratch_for(device: torch.device) -> Scratch:
    """The scratch of the current stream (CUDA, ROCm), or of the current thread (CPU): work on it is in order, so a
    buffer is never filled anew while a product still reads it."""
    budget = _budget(device)
    if device.type != "cuda":
        here: dict[str, Scratch] = _local.__dict__.setdefault("by_device", {})
        scratch = here.setdefault(str(device), Scratch(budget))
    else:
        key = (device.type, device.index, torch.cuda.current_stream(device).cuda_stream)
        scratch = _streams.setdefault(key, Scratch(budget))
    scratch.budget = budget
    return scratch


def _budget(device: torch.device) -> int:
    if device.type != "cuda":
        return SCRATCH_BYTES["cpu"]
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _gpu_budgets:  # a 64th of a small card is less
        total = torch.cuda.get_device_properties(index).total_memory
        _gpu_budgets[index] = max(SCRATCH_BYTES["cpu"], min(SCRATCH_BYTES["gpu"], total // 64))
    return _gpu_budgets[index]


def clear_scratch() -> None:
    """Give back what this thread and all streams hold, e.g. between a run and its merge."""
    for scratch in [*_local.__dict__.get("by_device", {}).values(), *_streams.values()]:
        scratch.clear()


def _capturing(tensor: Tensor) -> bool:
    # A captured graph must contain the dequantisation: at replay the buffer may hold another weight.
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
