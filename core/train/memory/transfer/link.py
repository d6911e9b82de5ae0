"""Between host memory and the device, for gradients that leave and weights that come back: a piece at a time, through
two buffers, so that the one is copied while the host works on the other. Used by one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from core.train.memory.transfer.pin import page_lock, unlock, whole_pages

PIECE_BYTES = 32 << 20
"""Of a buffer. At 25 GB/s a piece takes 1.3 ms: long beside the 20 µs that starting a copy costs."""


class Link(Protocol):
    def now(self) -> Any:
        """The moment at which the device has done what the caller has queued there."""

    def fetch(self, source: Tensor, after: Any) -> Iterator[tuple[slice, Tensor]]:
        """A flat tensor of the device as it is at that moment, piece by piece: (where, what), each good until the
        next."""

    def send(self, source: Tensor, target: Tensor, after: Any) -> None:
        """Begin to write a flat float32 tensor of the host to one of the device, in its dtype. The source may change
        once this has returned."""

    def sent(self) -> Any:
        """The moment at which everything sent so far is there."""

    def wait(self, sent: Any) -> None:
        """What the calling thread queues on the device from now on comes after that moment."""

    def close(self) -> None: ...


class OneMemory:
    """The device is the host's processor."""

    def now(self) -> None:
        pass

    def fetch(self, source: Tensor, after: None) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, source.numel()), source

    def send(self, source: Tensor, target: Tensor, after: None) -> None:
        target.copy_(source)

    def sent(self) -> None:
        pass

    def wait(self, sent: None) -> None:
        pass

    def close(self) -> None:
        pass


class SideStream:
    """A GPU's: a stream beside the one that computes."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        """PinnedRefused when the buffers cannot be locked."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[_Buffer] = []
        try:
            for _ in range(2):
                self._buffers.append(_Buffer(PIECE_BYTES, pinned))
        except BaseException:
            self.close()
            raise

    def now(self) -> torch.cuda.Event:
        return _recorded(torch.cuda.current_stream(self._device))

    def fetch(self, source: Tensor, after: torch.cuda.Event) -> Iterator[tuple[slice, Tensor]]:
        self._stream.wait_event(after)
        pieces = _pieces(source)
        coming: list[tuple[slice, Tensor, _Buffer]] = []
        for piece in [*pieces, None]:
            if piece is not None:
                buffer, view = self._next(source.dtype, piece)
                with torch.cuda.stream(self._stream):
                    view.copy_(source[piece], non_blocking=True)
                    buffer.copied.record(self._stream)
                coming.append((piece, view, buffer))
            if len(coming) == 2 or (piece is None and coming):
                where, what, buffer = coming.pop(0)
                buffer.copied.synchronize()
                yield where, what

    def send(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> None:
        self._stream.wait_event(after)
        for piece in _pieces(target):
            buffer, view = self._next(target.dtype, piece)
            view.copy_(source[piece])
            with torch.cuda.stream(self._stream):
                target[piece].copy_(view, non_blocking=True)
                buffer.copied.record(self._stream)

    def sent(self) -> torch.cuda.Event:
        return _recorded(self._stream)

    def wait(self, sent: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(sent)

    def close(self) -> None:
        self._stream.synchronize()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _next(self, dtype: torch.dtype, piece: slice) -> tuple[_Buffer, Tensor]:
        """The buffer used longer ago, once its last copy is done."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.copied.synchronize()
        return buffer, buffer.bytes.view(dtype)[: piece.stop - piece.start]


def link_to(device: torch.device, *, pinned: bool) -> Link:
    return SideStream(device, pinned=pinned) if device.type == "cuda" else OneMemory()


class _Buffer:
    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = whole_pages(nbytes)
        self.copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned = pinned
        if pinned:
            page_lock(self.bytes, "memory.offload_optimizer.pinned")

    def close(self) -> None:
        if self._pinned:
            unlock(self.bytes)


def _pieces(flat: Tensor) -> list[slice]:
    step = PIECE_BYTES // flat.element_size()
    return [slice(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
