"""Where blocks lie that are not on the device: in host memory, or in files. Frozen, so only ever read.

Each block is one run of bytes, in the order that a slot takes it. `rest` is the same bytes as a tensor that anything
but a training step may read (a merge, an export): the buffer itself, or the file as it is mapped.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from core.errors import EftError, ModelError
from core.train.memory.available import available_bytes
from core.train.memory.streaming.blocks import FIELD, StreamedBlock
from core.train.memory.transfer.pinned import host_buffer, unlock

READ_BYTES = 8 << 20
"""Read at once: a stop need not wait for a whole block."""


class BlocksLost(EftError):
    """The file that the blocks are read from can no longer be read, or is not what it was."""

    code = "blocks_lost"
    status = 500


class BlockSource(Protocol):
    """Blocks by number."""

    def rest(self, block: int) -> Tensor:
        """uint8 [bytes of the block] on the CPU; read-only."""

    def read(self, block: int, into: Tensor) -> None:
        """Copy the block to the beginning of `into`, uint8 on the CPU. From any thread; BlocksLost when it cannot."""

    def close(self) -> None: ...


# --- in memory -------------------------------------------------------------------------------------------


class HostBlocks:
    """One contiguous buffer a block, page-locked where a GPU copies from it by itself."""

    def __init__(self, blocks: Sequence[StreamedBlock], *, pinned: bool) -> None:
        """Takes the blocks' tensors one block after the other, each freed once it is copied, so that at no time more
        than one block is there twice. The model sees the buffers from then on. PinnedRefused, and ModelError when there
        is no memory for the buffers."""
        self.pinned = pinned
        self._buffers: list[Tensor] = []
        try:
            for block in blocks:
                self._buffers.append(_buffer(block, pinned))
                views = block.views(self._buffers[-1])
                for view, place in zip(views, block.places, strict=True):
                    view.copy_(place.tensor.detach())
                block.put(views)
        except BaseException:
            self.close()
            raise

    def rest(self, block: int) -> Tensor:
        return self._buffers[block]

    def read(self, block: int, into: Tensor) -> None:
        held = self._buffers[block]
        into[: held.numel()].copy_(held)

    def close(self) -> None:
        if self.pinned:
            for buffer in self._buffers:
                unlock(buffer)
            self.pinned = False


def _buffer(block: StreamedBlock, pinned: bool) -> Tensor:
    if (free := available_bytes()) is not None and free < block.nbytes:
        raise _no_host_memory(block, f"{free >> 20} MiB are free")
    try:
        return host_buffer(block.nbytes, pinned=pinned)
    except RuntimeError as error:  # of the allocator: its words differ
        raise _no_host_memory(block, "the system gives no more") from error


def _no_host_memory(block: StreamedBlock, why: str) -> ModelError:
    return ModelError(
        f"this box has no memory left for the frozen blocks ({why} at {block.name}, which takes "
        f"{(block.nbytes >> 20) + 1} MiB): set `memory.stream` to `disk`",
        field=FIELD,
        code="blocks_do_not_fit",
    )


# --- in files --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _File:
    path: Path
    start: int
    nbytes: int
    descriptor: int
    mapped: Tensor | None = field(default=None)


class FileBlocks:
    """One range of a file a block: read with preadv(2) into a slot or a page-locked buffer; mapped only for `rest`.

    A training step does not read the mapping: a page of it that cannot be had, because the file was cut short or its
    disk is gone, kills the process (SIGBUS), where a read says why. A file that is deleted meanwhile can be read to the
    end, as it is open.
    """

    def __init__(self, ranges: Sequence[tuple[Path, int, int]]) -> None:
        """(file, first byte, bytes) of each block."""
        self._files: list[_File] = []
        try:
            for path, start, nbytes in ranges:
                self._files.append(_File(path, start, nbytes, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
                self._check(self._files[-1])
        except OSError as error:
            self.close()
            raise _lost(path, str(error)) from error

    def rest(self, block: int) -> Tensor:
        """Mapped read-only: it takes no memory that is not the file's own. Writing to it kills the process."""
        file = self._files[block]
        if file.mapped is None:
            self._check(file)
            whole = mmap.mmap(file.descriptor, file.start + file.nbytes, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                file.mapped = torch.frombuffer(whole, dtype=torch.uint8, offset=file.start, count=file.nbytes)
        return file.mapped

    def read(self, block: int, into: Tensor) -> None:
        file = self._files[block]
        target = memoryview(into.numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < file.nbytes:
                piece = target[done : min(file.nbytes, done + READ_BYTES)]
                count = os.preadv(file.descriptor, [piece], file.start + done)
                if count == 0:
                    raise _lost(file.path, f"it ends at byte {file.start + done}")
                done += count
        except OSError as error:
            raise _lost(file.path, str(error)) from error
        torch.autograd.graph.increment_version(into)  # torch has not seen the write

    def close(self) -> None:
        """Mappings live as long as tensors show them."""
        for file in self._files:
            if file.descriptor >= 0:
                os.close(file.descriptor)
                file.descriptor = -1

    def _check(self, file: _File) -> None:
        size = os.fstat(file.descriptor).st_size
        if size < file.start + file.nbytes:
            raise _lost(file.path, f"it has {size} bytes in place of {file.start + file.nbytes}")


def _lost(path: Path, why: str) -> BlocksLost:
    return BlocksLost(
        f"the frozen blocks can no longer be read from {path} ({why}): the data root's disk is gone or the file was "
        "changed; the job continues from its last checkpoint once the disk is back (retry it)",
        field=FIELD,
    )
