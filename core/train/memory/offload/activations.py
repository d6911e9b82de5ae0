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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from core.train.memory.available import available_bytes
from core.train.memory.transfer.pin import page_lock, unlock, whole_pages

FIELD = "memory.activation_offloading"
IN_FLIGHT = 2
"""Inputs that are on the device at most while they are copied out: one that goes, one that is next."""
PAGE = 4096


@dataclass(slots=True)
class OffloadCounts:
    """What was moved so far."""

    out: int = 0
    """Inputs copied to the host."""
    bytes: int = 0
    """Of them."""
    ahead: int = 0
    """Inputs that were brought back before anybody asked."""
    late: int = 0
    """Inputs that were only brought back when asked for."""
    stayed: int = 0
    """Inputs that were still on the device when asked for."""


class Copies(Protocol):
    """How bytes get to the host and back. An event is what `wait` takes."""

    def out(self, tensor: Tensor, host: Tensor) -> Any:
        """Copy a tensor on the device to host memory of its shape, after what is computed so far."""

    def back(self, host: Tensor) -> tuple[Tensor, Any]:
        """The same tensor on the device again, filled when its event is done."""

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the event."""


class Here:
    """On a CPU: device and host are one memory."""

    def out(self, tensor: Tensor, host: Tensor) -> Any:
        host.copy_(tensor)

    def back(self, host: Tensor) -> tuple[Tensor, Any]:
        return host.clone(), None

    def wait(self, event: Any) -> None:
        pass


class SideStream:
    """On a GPU: a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, tensor: Tensor, host: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            return self._stream.record_event()

    def back(self, host: Tensor) -> tuple[Tensor, Any]:
        # Made on the stream that computes and will give it back: its memory may be in use there until now.
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
            return tensor, self._stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class HostPool:
    """Host buffers, page-locked where a GPU copies from and to them. They are given back and taken again, since locking
    takes longer than a copy; one that is too small is replaced by one that is not."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.nbytes = 0
        """Of all buffers, in use or not."""
        self._free: list[Tensor] = []
        self._closed = False

    @property
    def in_use(self) -> int:
        """Bytes of the buffers that inputs lie in now."""
        return self.nbytes - sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [at least nbytes]. PinnedRefused when the system locks no more memory, MemoryError when there is
        none."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if fitting:
            return self._pop(min(fitting, key=lambda buffer: buffer.nbytes))
        if self._free:
            self._drop(self._pop(max(self._free, key=lambda buffer: buffer.nbytes)))
        if (free := available_bytes()) is not None and free < nbytes:
            raise MemoryError(f"{free >> 20} MiB of host memory are free, and a block's input takes {nbytes >> 20}")
        size = -(-nbytes // PAGE) * PAGE
        buffer = whole_pages(size) if self.pinned else torch.empty(size, dtype=torch.uint8)
        if self.pinned:
            page_lock(buffer, f"{FIELD}.pinned")
        self.nbytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        if self._closed:
            self._drop(buffer)
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Free what is not in use now, and the rest when it is given back."""
        self._closed = True
        while self._free:
            self._drop(self._free.pop())

    def _pop(self, buffer: Tensor) -> Tensor:
        self._free = [other for other in self._free if other is not buffer]
        return buffer

    def _drop(self, buffer: Tensor) -> None:
        if self.pinned:
            torch.cuda.synchronize()  # nothing copies from or to it any more
            unlock(buffer)
        self.nbytes -= buffer.nbytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedTensor:
    """An input that was put away. It lives as long as autograd, or a unit's call, holds it."""

    pool: HostPool
    copies: Copies
    buffer: Tensor
    host: Tensor
    """The input in it."""
    tensor: Tensor | None
    """On the device: on its way out, or on its way back and not yet asked for."""
    event: Any
    """Of the last copy."""
    before: weakref.ref[OffloadedTensor] | None
    """Put before this one."""
    version: int
    """Of the tensor when it was put."""
    asked: bool = False

    def let_go(self) -> Tensor | None:
        """What is on the device, if anything, after the copy that reads or fills it: it may be used, or its memory be
        used for something else."""
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            return None
        self.copies.wait(self.event)
        if not self.asked and tensor._version != self.version:
            raise RuntimeError("the input of a checkpointed block was written into after the block had read it")
        return tensor

    def __del__(self) -> None:
        if self.tensor is not None:
            self.copies.wait(self.event)
        self.pool.give(self.buffer)


class ActivationOffload:
    """The inputs of a model's checkpointed blocks, in host memory between forward and backward."""

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        self.counts = OffloadCounts()
        self.pool = HostPool(pinned=pinned and device.type == "cuda")
        self._copies: Copies = SideStream(device) if device.type == "cuda" else Here()
        self._going: deque[weakref.ref[OffloadedTensor]] = deque()
        """On their way out."""
        self._last: weakref.ref[OffloadedTensor] | None = None

    def put(self, tensor: Tensor) -> OffloadedTensor | Tensor:
        """Put a block's input away; `get` answers it. A tensor that is not contiguous, or empty, stays as it is.
        PinnedRefused when the system locks no more host memory."""
        if not tensor.is_contiguous() or not tensor.numel():
            return tensor
        tensor = tensor.detach()
        while len(self._going) >= IN_FLIGHT:
            self._settle(self._going.popleft())
        buffer = self.pool.take(tensor.nbytes)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        event = self._copies.out(tensor, host)
        stored = OffloadedTensor(self.pool, self._copies, buffer, host, tensor, event, self._last, tensor._version)
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
        stored.tensor, stored.event = self._copies.back(stored.host)
        stored.version = stored.tensor._version

    def _settle(self, going: weakref.ref[OffloadedTensor]) -> None:
        """An input that has gone: its memory on the device may be used for something else after the copy."""
        stored = going()
        if stored is not None:
            stored.let_go()

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """torch's checkpoint, or one that is called like it, which keeps the first tensor that its block is given here.
        The others (positions, masks) are the same for all blocks and stay where they are."""

        def checkpoint_with_input_put_away(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.first_put():
                return checkpoint(function, *args, **kwargs)

        return checkpoint_with_input_put_away

    @contextmanager
    def first_put(self) -> Iterator[None]:
        """Within, the first floating tensor that autograd saves is put away. What is saved inside of a checkpoint is
        under its own hooks."""
        first = True

        def pack(tensor: Tensor) -> OffloadedTensor | Tensor:
            nonlocal first
            if not first or not tensor.is_floating_point():
                return tensor
            first = False
            return self.put(tensor)

        with saved_tensors_hooks(pack, self.get):
            yield

    def about(self) -> dict[str, Any]:
        """For the run record."""
        return {"where": "host", "pinned": self.pool.pinned}

    def close(self) -> None:
        self._going.clear()
        self.pool.close()
