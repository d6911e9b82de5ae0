"""Block inputs in host memory between forward and backward: what a checkpointed block keeps is not on the device.

Forward: a block's input is copied out beside the computation that goes on with it, and given up on the device when the
copy is done; two at most are on their way at once, the one after waits (so a slow link slows the forward down and never
fills the card). Backward: as a block asks for its input, the one of the block before begins to come back, and is there
when its turn comes. The last two of a forward have not gone when the backward asks for them, and are not brought back.

Nothing here knows how many blocks there are, nor when a pass ends: an input that is put is linked to the one put before
it, its host memory returns to the pool when autograd lets go of it, and so a pass that breaks leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from core.plan.constants import INPUTS_IN_FLIGHT
from core.train.memory.transfer.pinned import HostPool
from core.train.memory.transfer.transfer import Event, Transfer

FIELD = "memory.activation_offloading"


@dataclass(slots=True)
class OffloadCounts:
    """Inputs moved so far."""

    out: int = 0
    """Inputs copied to the host."""
    bytes: int = 0
    """Size of the inputs copied to the host, bytes."""
    ahead: int = 0
    """Inputs brought back before they were asked for."""
    late: int = 0
    """Inputs brought back only when they were asked for."""
    stayed: int = 0
    """Inputs that were still on the device when asked for."""
    missed: int = 0
    """Calls of a checkpointed block whose input was not copied to the host."""

    def describe_missed(self) -> str:
        """The notice of a run in which inputs were not copied."""
        return (
            f"{self.missed:,} of {self.missed + self.out:,} times the input of a block stayed on the device, although "
            "`memory.activation_offloading` asks for the host: training needs more memory than was planned"
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedTensor:
    """A block's input in host memory. It lives as long as autograd, or the call of a checkpointed block, holds it."""

    pool: HostPool
    transfer: Transfer
    buffer: Tensor
    host: Tensor
    """The input in the buffer."""
    tensor: Tensor | None
    """On the device: on its way out, or on its way back and not yet asked for."""
    event: Event
    """Event of the last copy."""
    before: weakref.ref[OffloadedTensor] | None
    """The input that was put before this one."""
    version: int
    """Version counter of the tensor when it was put."""
    asked: bool = False

    def let_go(self) -> Tensor | None:
        """Give up the tensor on the device, if there is one, and return it. Computation queued from now on comes after
        the copy that reads or fills it, so that its memory may be used again."""
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            return None
        self.transfer.wait(self.event)
        if not self.asked and tensor._version != self.version:
            raise RuntimeError("the input of a checkpointed block was written into after the block had read it")
        return tensor

    def __del__(self) -> None:
        if self.tensor is not None:
            self.transfer.wait(self.event)
        self.pool.give(self.buffer)


class ActivationOffload:
    """The inputs of a model's checkpointed blocks, in host memory between forward and backward."""

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        self.counts = OffloadCounts()
        self.pool = HostPool(pinned=pinned and device.type == "cuda", field=f"{FIELD}.pinned")
        self._transfer = Transfer(device)
        self._going: deque[weakref.ref[OffloadedTensor]] = deque()
        """Inputs on their way out."""
        self._last: weakref.ref[OffloadedTensor] | None = None

    def put(self, tensor: Tensor) -> OffloadedTensor | Tensor:
        """Move a block's input to the host; `get` returns it. A tensor that is not contiguous stays where it is.
        PinnedRefused when the system locks no more host memory."""
        if not tensor.is_contiguous():
            self.counts.missed += 1
            return tensor
        tensor = tensor.detach()
        while len(self._going) >= INPUTS_IN_FLIGHT:
            self._settle(self._going.popleft())
        buffer = self.pool.take(tensor.nbytes)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        event = self._transfer.copy(tensor, host, after=self._transfer.computed())
        stored = OffloadedTensor(self.pool, self._transfer, buffer, host, tensor, event, self._last, tensor._version)
        self._last = weakref.ref(stored)
        self._going.append(self._last)
        self.counts.out += 1
        self.counts.bytes += tensor.nbytes
        return stored

    def get(self, stored: OffloadedTensor | Tensor) -> Tensor:
        """The input that was put, on the device; the one put before it begins to come back."""
        if isinstance(stored, Tensor):
            return stored
        if any(going() is stored for going in self._going):
            self.counts.stayed += 1
            self._going = deque(going for going in self._going if going() not in (None, stored))
        elif stored.tensor is None:
            self.counts.late += 1
            self._back(stored)
        tensor = stored.let_go()
        assert tensor is not None
        stored.asked = True
        before = None if stored.before is None else stored.before()
        if before is not None and before.tensor is None and not before.asked:
            self.counts.ahead += 1
            self._back(before)
        return tensor

    def _back(self, stored: OffloadedTensor) -> None:
        # Made on the stream that computes and frees it: until now its memory may be in use there.
        tensor = torch.empty(stored.host.shape, dtype=stored.host.dtype, device=self.device)
        stored.event = self._transfer.copy(stored.host, tensor, after=self._transfer.computed())
        stored.tensor, stored.version = tensor, tensor._version

    def _settle(self, going: weakref.ref[OffloadedTensor]) -> None:
        """An input that has gone: its memory on the device may be used for something else after the copy."""
        stored = going()
        if stored is not None:
            stored.let_go()

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """torch's checkpoint, or one that is called like it, which keeps the first tensor that its block is given here.
        The others (positions, masks) are the same for all blocks and stay where they are."""

        def checkpoint_with_input_on_host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.first_put():
                return checkpoint(function, *args, **kwargs)

        return checkpoint_with_input_on_host

    @contextmanager
    def first_put(self) -> Iterator[None]:
        """Within, the first floating tensor that autograd saves goes to the host. A checkpoint inside has hooks of its
        own. Empty tensors do not count: torch's checkpoint saves one before its block's input (torch 2.11)."""
        first = True

        def pack(tensor: Tensor) -> OffloadedTensor | Tensor:
            nonlocal first
            if not first or not tensor.is_floating_point() or not tensor.numel():
                return tensor
            first = False
            return self.put(tensor)

        with saved_tensors_hooks(pack, self.get):
            yield
        if first and torch.is_grad_enabled():
            self.counts.missed += 1

    def about(self) -> dict[str, Any]:
        """For the run record."""
        return {"where": "host", "pinned": self.pool.pinned}

    def close(self) -> None:
        self._going.clear()
        self.pool.close()
