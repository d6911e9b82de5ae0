"""The marker between operators and selective checkpoints: an operator says which result is worth saving, and the
checkpoint that is active on this thread decides (core/train/memory/checkpointing/selective.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class ResultSaver(Protocol):
    """A selective checkpoint around a block's forward or its recomputation."""

    def result(self, compute: Callable[[], Tensor]) -> Tensor: ...


class _Active(threading.local):
    saver: ResultSaver | None = None


active = _Active()
"""The checkpoint that this thread is in, set by it alone."""


def save_result(compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`, or its result from the forward where a selective checkpoint recomputes the block. For results that a
    dispatch mode would not see whole: computed by several operators, or outside of torch."""
    return compute() if active.saver is None else active.saver.result(compute)
