"""Copies between host memory and a device beside the computation: for layer streaming and for both kinds of offload.

On a GPU the copies are queued on a CUDA stream of their own. What computes and what copies wait for one another by
events. On a CPU device and host are one memory: each copy is done when its call returns, and every event is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.train.memory.transfer.pinned import host_buffer, unlock

Event = torch.cuda.Event | None


class Transfer:
    """A queue of copies to and from one device, used by one thread at a time. The copies run in the order in which they
    are queued. A tensor of the device must stay alive until `wait` has been called for the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def computed(self) -> Event:
        """An event behind all that the calling thread has queued for computation."""
        return None if self._stream is None else _recorded(torch.cuda.current_stream(self.device))

    def copy(self, source: Tensor, target: Tensor, *, after: Event) -> Event:
        """Queue a copy that begins after the event. The host blocks only for memory that is not page-locked."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _recorded(self._stream)

    def copied(self) -> Event:
        """An event behind all copies queued so far."""
        return None if self._stream is None else _recorded(self._stream)

    def wait(self, event: Event) -> None:
        """Let the device begin what the calling thread queues from now on after the event. The host does not block."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def close(self) -> None:
        """Block until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(slots=True)
class _Staging:
    bytes: Tensor
    copied: Event = None
    """Event of the last copy from or to it."""


class StagedTransfer(Transfer):
    """A transfer through two buffers in host memory: the device copies one while the host works on the other. On a CPU
    there are no buffers."""

    def __init__(self, device: torch.device, nbytes: int, *, pinned: bool, field: str) -> None:
        """`nbytes`: size of each buffer; 0: none are needed. `pinned`: they are page-locked; PinnedRefused, naming
        `field`, when the system refuses that."""
        super().__init__(device)
        self._pinned = pinned
        self._staging: list[_Staging] = []
        try:
            for _ in range(0 if self._stream is None or not nbytes else 2):
                self._staging.append(_Staging(host_buffer(nbytes, pinned=pinned, field=field)))
        except BaseException:
            self.close()
            raise

    def fill(self, target: Tensor, write: Callable[[Tensor], None], *, after: Event) -> Event:
        """Queue a copy to `target`, flat, of what `write` puts into a tensor of its size and dtype in host memory. The
        copy begins after the event; `write` has returned when this returns."""
        if not self._staging:
            write(target)
            return None
        buffer, view = self._next(target)
        write(view)
        buffer.copied = self.copy(view, target, after=after)
        return buffer.copied

    def fetch(self, source: Tensor, *, after: Event) -> Iterator[tuple[slice, Tensor]]:
        """A flat tensor of the device as it is after the event, piece by piece in host memory: (its place, the piece).
        Each piece is valid until the next one is asked for."""
        if not self._staging:
            yield slice(0, source.numel()), source
            return
        coming: list[tuple[slice, Tensor, Event]] = []
        for place in [*self._pieces(source), None]:
            if place is not None:
                buffer, view = self._next(source[place])
                buffer.copied = self.copy(source[place], view, after=after)
                coming.append((place, view, buffer.copied))
            if len(coming) == 2 or (place is None and coming):
                ready, piece, copied = coming.pop(0)
                if copied is not None:
                    copied.synchronize()
                yield ready, piece

    def send(self, source: Tensor, target: Tensor, *, after: Event) -> None:
        """Queue copies of a flat tensor in host memory to a flat one of the device, in its dtype, piece by piece. The
        source may change once this returns."""
        for place in self._pieces(target):
            self.fill(target[place], partial(_copy, source[place]), after=after)

    def _pieces(self, flat: Tensor) -> list[slice]:
        """The ranges of a flat tensor that each fit into a buffer; one range where there are no buffers."""
        total = flat.numel()
        step = self._staging[0].bytes.nbytes // flat.element_size() if self._staging else max(1, total)
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

    def close(self) -> None:
        super().close()
        for buffer in self._staging:
            if self._pinned:
                unlock(buffer.bytes)
        self._staging = []

    def _next(self, like: Tensor) -> tuple[_Staging, Tensor]:
        """The buffer used longer ago, once its last copy is done, and its beginning as a tensor like this one."""
        buffer = self._staging.pop(0)
        self._staging.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer, buffer.bytes[: like.nbytes].view(like.dtype)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = stream.record_event()
    return event


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
