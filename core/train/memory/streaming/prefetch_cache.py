"""The slots on the device, and which block is in each.

    empty → filling (a copy is under way) → ready → in use → ready → filled with another …

One block is in use at a time: a block's forward, or its recomputation and backward, never contains another block's. So
nothing is counted: taking a block ends what an interrupted pass may have left in use. Slots are filled in the order in
which blocks are asked for, by one thread or one stream, so that a slot whose copy is no longer wanted may be given away
at once: the next copy waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from core.train.memory.streaming.block_source import BlockSource, HostBlocks
from core.train.memory.streaming.blocks import FIELD
from core.train.memory.transfer.transfer import Event, StagedTransfer


@dataclass(slots=True, eq=False)
class CacheSlot:
    buffer: Tensor
    """uint8 on the device, as large as the largest block."""
    block: int | None = None
    """The block in it, or on its way into it."""
    used: int = 0
    """When it was last taken: a count of takes."""
    copy: Future[Event] | None = None
    """The thread's copy into it, until it has been waited for."""
    ready: Event = None
    """The last copy into it is done."""
    free: Event = None
    """The last computation that reads it is done."""


@dataclass(slots=True)
class StreamCounts:
    """Copies into the slots so far."""

    copies: int = 0
    bytes: int = 0
    ahead: int = 0
    """Copies that began before their block was taken."""
    found: int = 0
    """Blocks that were in a slot, or on their way, when they were taken."""
    missed: int = 0
    """Blocks that were not."""
    waited: float = 0.0
    """Seconds for which the process was blocked. On a GPU the device waits, and the process goes on."""
    by_block: dict[int, int] = field(default_factory=dict)
    """Copies of each block."""


class SlotFiller:
    """Copies blocks into slots. On a GPU the copies run beside the computation: directly from host memory, or from
    files through two page-locked buffers that a thread reads into. On a CPU the thread reads straight into the slot."""

    def __init__(self, device: torch.device, source: BlockSource, largest: int, *, pinned: bool) -> None:
        """`largest`: size of the largest block, bytes. `pinned`: the buffers are page-locked."""
        directly = device.type == "cuda" and isinstance(source, HostBlocks)
        self._source = source
        self._transfer = StagedTransfer(device, 0 if directly else largest, pinned=pinned, field=f"{FIELD}.pinned")
        self._thread = None if directly else ThreadPoolExecutor(1, thread_name_prefix="eft-stream")

    def start(self, slot: CacheSlot, block: int, nbytes: int) -> None:
        """Begin to fill the slot, after what is still computed from it."""
        if slot.free is None:
            slot.free = self._transfer.computed()
        target = slot.buffer[:nbytes]
        if self._thread is None:
            slot.ready = self._transfer.copy(self._source.rest(block), target, after=slot.free)
        else:
            read = partial(self._source.read, block)
            slot.copy = self._thread.submit(self._transfer.fill, target, read, after=slot.free)

    def wait(self, slot: CacheSlot) -> None:
        """What is computed from now on finds the slot filled. Raises what went wrong with the copy."""
        if slot.copy is not None:
            slot.ready, slot.copy = slot.copy.result(), None
        self._transfer.wait(slot.ready)

    def freed(self, slot: CacheSlot) -> None:
        """What has been queued for computation so far is the last that reads the slot."""
        slot.free = self._transfer.computed()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._transfer.close()


class PrefetchCache:
    """K slots on the device for N blocks: a block is copied in ahead of its use, and the least recently used one gives
    way."""

    def __init__(self, slots: Sequence[CacheSlot], sizes: Sequence[int], filler: SlotFiller) -> None:
        """`sizes`: size of each block, bytes."""
        self.slots = list(slots)
        self.counts = StreamCounts()
        self._sizes = list(sizes)
        self._filler = filler
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
            self._filler.wait(slot)
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
            self._filler.freed(slot)

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
        self._filler.close()

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
        self._filler.start(slot, block, self._sizes[block])
        slot.block = block
        self.counts.copies += 1
        self.counts.bytes += self._sizes[block]
        self.counts.by_block[block] = self.counts.by_block.get(block, 0) + 1
