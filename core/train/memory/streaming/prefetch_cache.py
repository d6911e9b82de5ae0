"""The slots on the device, and who is in them.

    empty → filling (a copy is under way) → ready → in use → ready → filled with another …

One block is in use at a time: a block's forward, or its recomputation and backward, never contains another block's. So
there is nothing to count: whoever takes a block ends what an interrupted pass may have left in use. Slots are filled in
the order asked for, by one thread or one stream, so that a slot whose copy nobody wants any more may be given away at
once: the next copy waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from core.train.memory.streaming.block_source import BlockSource, HostBlocks
from core.train.memory.transfer.pin import page_lock, unlock, whole_pages


@dataclass(slots=True, eq=False)
class CacheSlot:
    buffer: Tensor
    """uint8 on the device, as large as the largest block."""
    block: int | None = None
    """What is in it, or on its way into it."""
    used: int = 0
    """When it was last taken: a count of takes."""
    copy: Future[None] | None = None
    """The copy that this process still has to wait for."""
    ready: Any = None
    """Event: the copy is done (GPU)."""
    free: Any = None
    """Event: the last computation that reads it is done (GPU)."""


@dataclass(slots=True)
class StreamCounts:
    """What the slots have done so far."""

    copies: int = 0
    bytes: int = 0
    ahead: int = 0
    """Of the copies: begun before anybody waited for them."""
    found: int = 0
    """Blocks that were in a slot, or on their way, when they were taken."""
    missed: int = 0
    """Blocks that were not."""
    waited: float = 0.0
    """Seconds that this process stood still for a block. On a GPU the device waits, not the process."""
    by_block: dict[int, int] = field(default_factory=dict)
    """Copies of each block."""


class Copier(Protocol):
    def start(self, slot: CacheSlot, block: int, nbytes: int) -> None:
        """Begin to fill the slot, after what is still computed from it."""

    def wait(self, slot: CacheSlot) -> None:
        """What is computed from now on finds the slot filled. Raises what went wrong with the copy."""

    def freed(self, slot: CacheSlot) -> None:
        """What was asked for so far is the last that reads the slot."""

    def close(self) -> None: ...


class PrefetchCache:
    """K slots for N blocks."""

    def __init__(self, slots: Sequence[CacheSlot], sizes: Sequence[int], copier: Copier) -> None:
        """`sizes`: bytes of each block."""
        self.slots = list(slots)
        self.counts = StreamCounts()
        self._sizes = list(sizes)
        self._copier = copier
        self._held: CacheSlot | None = None

    @property
    def held(self) -> int | None:
        """The block in use."""
        return None if self._held is None else self._held.block

    def take(self, block: int) -> CacheSlot:
        """The slot with this block in it, in use until `give`. Raises what went wrong with its copy: then nothing is in
        use, and the slot is empty."""
        self.give()
        slot = self._with(block)
        if slot is None:
            self.counts.missed += 1
            slot = self._victim(())
            assert slot is not None  # none is held
            self._fill(slot, block)
        else:
            self.counts.found += 1
        started = time.perf_counter()
        try:
            self._copier.wait(slot)
        except BaseException:
            slot.block = None
            raise
        self.counts.waited += time.perf_counter() - started
        self._held = slot
        slot.used = self.counts.found + self.counts.missed
        return slot

    def give(self) -> None:
        """The block in use, if any, is no longer."""
        slot, self._held = self._held, None
        if slot is not None:
            self._copier.freed(slot)

    def ahead(self, blocks: Iterable[int]) -> None:
        """Begin to fill slots with these, the soonest first, as far as there are slots that hold none of them."""
        wanted = list(blocks)[: len(self.slots) - 1]
        for block in wanted:
            if self._with(block) is not None:
                continue
            slot = self._victim(wanted)
            if slot is None:
                return
            self.counts.ahead += 1
            self._fill(slot, block)

    def close(self) -> None:
        self.give()
        self._copier.close()

    def _with(self, block: int) -> CacheSlot | None:
        return next((slot for slot in self.slots if slot.block == block), None)

    def _victim(self, keep: Sequence[int]) -> CacheSlot | None:
        """An empty slot, or else the one not used for longest, of those that may be filled anew."""
        open_ = [
            slot for slot in self.slots if slot is not self._held and (slot.block is None or slot.block not in keep)
        ]
        return min(open_, key=lambda slot: (slot.block is not None, slot.used), default=None)

    def _fill(self, slot: CacheSlot, block: int) -> None:
        slot.block = None  # should the copy not even begin
        self._copier.start(slot, block, self._sizes[block])
        slot.block = block
        self.counts.copies += 1
        self.counts.bytes += self._sizes[block]
        self.counts.by_block[block] = self.counts.by_block.get(block, 0) + 1


def copier_for(device: torch.device, source: BlockSource, largest: int, *, pinned: bool) -> Copier:
    """`largest`: bytes of the largest block. `pinned`: what files are read into is page-locked, for a GPU."""
    if device.type == "cuda":
        return SideStream(device, source, largest, pinned)
    return CopyThread(source)


class CopyThread:
    """On a CPU: a thread reads or copies the next block while this one computes."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="eft-stream")

    def start(self, slot: CacheSlot, block: int, nbytes: int) -> None:
        slot.copy = self._pool.submit(self._source.read, block, slot.buffer)

    def wait(self, slot: CacheSlot) -> None:
        if slot.copy is not None:
            slot.copy.result()
            slot.copy = None

    def freed(self, slot: CacheSlot) -> None:
        pass  # what was computed is done

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class SideStream:
    """On a GPU: a stream beside the one that computes. From host memory it copies straight away; from files a thread
    reads into one of two page-locked buffers and has it copied from there."""

    def __init__(self, device: torch.device, source: BlockSource, largest: int, pinned: bool) -> None:
        self._device = device
        self._source = source
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: ThreadPoolExecutor | None = None
        self._stages: list[_Stage] = []
        if not isinstance(source, HostBlocks):
            try:
                for _ in range(2):
                    self._stages.append(_Stage(largest, pinned))
            except BaseException:
                for stage in self._stages:
                    stage.close()
                raise
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="eft-stream")

    def start(self, slot: CacheSlot, block: int, nbytes: int) -> None:
        if slot.free is None:
            slot.ready, slot.free = _event(), _event()
            slot.free.record(torch.cuda.current_stream(self._device))
        if self._pool is None:
            self._copy(slot, self._source.rest(block))
        else:
            slot.copy = self._pool.submit(self._through, slot, block, nbytes)

    def wait(self, slot: CacheSlot) -> None:
        if slot.copy is not None:
            slot.copy.result()
            slot.copy = None
        torch.cuda.current_stream(self._device).wait_event(slot.ready)

    def freed(self, slot: CacheSlot) -> None:
        slot.free.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._stream.synchronize()
        for stage in self._stages:
            stage.close()

    def _copy(self, slot: CacheSlot, block: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.free)
            slot.buffer[: block.numel()].copy_(block, non_blocking=True)
            slot.ready.record(self._stream)

    def _through(self, slot: CacheSlot, block: int, nbytes: int) -> None:
        stage = self._stages.pop(0)
        self._stages.append(stage)
        stage.copied.synchronize()
        self._source.read(block, stage.buffer)
        self._copy(slot, stage.buffer[:nbytes])
        stage.copied.record(self._stream)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Stage:
    """A buffer in host memory that a file is read into."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.buffer = whole_pages(nbytes)
        self.copied = _event()
        self._pinned = pinned
        if pinned:
            page_lock(self.buffer)

    def close(self) -> None:
        if self._pinned:
            unlock(self.buffer)
