"""Layer streaming: the frozen weights of a model's blocks pass through a few slots on the device.

Order: quantise → adapt → stream. Each block's streamed tensors (core/train/memory/streaming/blocks.py says which) lie
in one run of bytes in host memory or in a file; parameters and buffers of the model show that, until their block is
taken: then they show a slot. Blocks are frozen, so nothing is ever copied back. While a block computes, the next one is
on its way: the one after it in a forward, the one before it in a backward, the first again where one forward follows
another.

Training makes every block a checkpoint unit (core/train/memory/checkpointing/checkpointed_block.py). Without gradients
(evaluation, generation) a block is taken for its forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import ModelError, SpecError
from core.train.base.out_of_memory import is_out_of_memory
from core.train.memory.available import available_bytes
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy, check_arguments, run_checkpointed
from core.train.memory.streaming.block_source import BlockSource, FileBlocks, HostBlocks
from core.train.memory.streaming.blocks import FIELD, StreamedBlock, lay_out
from core.train.memory.streaming.prefetch_cache import CacheSlot, PrefetchCache, SlotFiller, StreamCounts

_OWNERS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[StreamedModel], int]] = weakref.WeakKeyDictionary()
"""Modules in streamed blocks. Not in the modules themselves: those are copied, and a copy is not streamed."""


class StreamedModel:
    """A model whose blocks are streamed. It works on the model that it is given: forwards of its blocks are replaced,
    names, modules and the state dict stay."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[StreamedBlock],
        source: BlockSource,
        device: torch.device,
        *,
        slots: int,
        pinned: bool = True,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        """Moves everything that is not streamed to `device`. `keeps`: of a block, for its backward; None: its input.
        SpecError when the slots do not fit there, or are more than the model has blocks."""
        self.blocks = list(blocks)
        self.source = source
        self.device = device
        self.policy = policy or CheckpointPolicy()
        self._pinned = pinned and device.type == "cuda"
        self._largest = max(block.nbytes for block in self.blocks)
        if slots > len(self.blocks):
            raise SpecError(
                f"`slots: {slots}` for a model of {len(self.blocks)} blocks: all of it would be on the device; leave "
                "`memory.stream` out, or take fewer",
                field=f"{FIELD}.slots",
                code="more_slots_than_blocks",
            )
        self._move(model)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        buffers = self._allocate(slots)
        filler = SlotFiller(device, source, self._largest, pinned=pinned)
        self.cache = PrefetchCache(
            [CacheSlot(buffer) for buffer in buffers], [block.nbytes for block in self.blocks], filler
        )
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        for number, block in enumerate(self.blocks):
            block.module.forward = partial(self._forward, number, block.module.forward)
            for module in block.module.modules():
                _OWNERS[module] = (weakref.ref(self), number)

    # --- a block at a time -------------------------------------------------------------------------------

    @contextmanager
    def on_device(self, number: int, ahead: Sequence[int] = ()) -> Iterator[None]:
        """Within, the model shows this block in a slot; `ahead` are those to be had next. However it ends, nothing is
        in use afterwards."""
        block = self.blocks[number]
        try:
            slot = self.cache.take(number)
            block.put(self._in_slot(slot, number))
            self.cache.ahead(ahead)
            yield
        finally:
            block.put(self._at_rest(number))
            self.cache.give()

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check_arguments(args, kwargs)
        after = list(range(number + 1, len(self.blocks)))
        if not torch.is_grad_enabled():
            with self.on_device(number, after + list(range(number))):
                return forward(*args, **kwargs)
        return run_checkpointed(
            forward,
            args,
            kwargs,
            first=partial(self.on_device, number, after),
            again=partial(self.on_device, number, list(range(number - 1, -1, -1))),
            anchor=self._anchor,
            policy=self.policy,
        )

    def _in_slot(self, slot: CacheSlot, number: int) -> list[Tensor]:
        key = (self.cache.slots.index(slot), number)
        if key not in self._views:
            self._views[key] = self.blocks[number].views(slot.buffer)
        return self._views[key]

    def _at_rest(self, number: int) -> list[Tensor]:
        key = (-1, number)
        if key not in self._views:
            self._views[key] = self.blocks[number].views(self.source.rest(number))
        return self._views[key]

    # --- the beginning and the end -----------------------------------------------------------------------

    def _move(self, model: nn.Module) -> None:
        for block in self.blocks:
            block.put([torch.empty(0, dtype=part.dtype) for part in block.parts])
        try:
            model.to(self.device)
        finally:
            for number, block in enumerate(self.blocks):
                block.put(block.views(self.source.rest(number)))

    def _allocate(self, slots: int) -> list[Tensor]:
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_bytes()
        if free is not None and free < slots * self._largest:
            raise self._no_room(slots, f"{free >> 20} MiB are free")
        try:
            return [torch.empty(self._largest, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._no_room(slots, "the device has no memory left") from error

    def _no_room(self, slots: int, why: str) -> SpecError:
        fewer = "take fewer slots, or " if slots > 1 else ""
        return SpecError(
            f"{slots} slots of {(self._largest >> 20) + 1} MiB, one block each, do not fit on the device ({why}): "
            f"{fewer}pack the weights tighter (`method: qlora`)",
            field=f"{FIELD}.slots",
            code="slots_do_not_fit",
        )

    @property
    def counts(self) -> StreamCounts:
        return self.cache.counts

    def about(self) -> dict[str, Any]:
        """For the run record."""
        return {
            "slots": len(self.cache.slots),
            "pinned": self._pinned,
            "slot_bytes": self._largest,
            "blocks": len(self.blocks),
            "block_bytes": sum(block.nbytes for block in self.blocks),
        }

    def close(self) -> None:
        """Blocks stay where they are at rest; nothing is taken any more."""
        self.cache.close()
        self.source.close()


def stream_from_host(
    model: nn.Module, device: torch.device, *, slots: int, pinned: bool = True, policy: CheckpointPolicy | None = None
) -> StreamedModel:
    """Stream a model that is in host memory. ModelError, SpecError and PinnedRefused as above and in source.py."""
    blocks = lay_out(model)
    source = HostBlocks(blocks, pinned=pinned and device.type == "cuda")
    try:
        return StreamedModel(model, blocks, source, device, slots=slots, pinned=pinned, policy=policy)
    except BaseException:
        source.close()  # what is page-locked is unlocked before it is freed
        raise


def stream_from_files(
    model: nn.Module,
    blocks: Sequence[StreamedBlock],
    source: FileBlocks,
    device: torch.device,
    *,
    slots: int,
    pinned: bool = True,
    policy: CheckpointPolicy | None = None,
) -> StreamedModel:
    """Stream a model whose blocks are mapped from files (core/train/memory/streaming/block_image.py). ModelError when
    adapting it has made something trained that lies there."""
    for block in blocks:
        for part, place in zip(block.parts, block.places, strict=True):
            if place.tensor.requires_grad:
                raise ModelError(f"{block.name}.{part.name} is trained and cannot be streamed", field=FIELD)
    return StreamedModel(model, blocks, source, device, slots=slots, pinned=pinned, policy=policy)


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Within, the weights of a module of a streamed model are on the device, beside its adapter. Nothing happens where
    the model is not streamed. What is made of the weights and outlives it must be a copy."""
    reference, number = next((_OWNERS[m] for m in module.modules() if m in _OWNERS), (None, -1))
    streamed = None if reference is None else reference()
    if streamed is None:
        yield
        return
    with streamed.on_device(number):
        yield
