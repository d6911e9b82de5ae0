"""Every byte of every tensor that torch makes, as long as it lives: a dispatch mode that counts storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`held` are counted from the start; `but` never (what lies in files, say). `peak`: the most there was at once."""

    def __init__(self, held: Iterable[Tensor], but: Iterable[Tensor]) -> None:
        super().__init__()
        self._left_out = [StorageWeakRef(tensor.untyped_storage()) for tensor in but]
        self._excluded = {ref.cdata for ref in self._left_out}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0
        """What there would be, had nothing been freed since `now` was asked last."""
        for tensor in held:
            self._see(tensor)
        self.start = self.peak = self.now()
        self._most = self.start

    def now(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref.cdata not in self._excluded and ref.cdata not in self._live:
            self._live[ref.cdata] = (ref, storage.nbytes())
            self._most += storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if self._most > self.peak:  # else there cannot be more than there was
            self._most = self.now()
            self.peak = max(self.peak, self._most)
        return result
