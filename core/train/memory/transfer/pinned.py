"""Page-locked host memory, which a GPU copies from and to by itself while the processor does something else.

Memory that is already there is registered with the driver (cudaHostRegister, CUDA Runtime API, "Memory Management";
torch for ROCm has hipHostRegister under the same name). torch's own pinned allocator would round each buffer up to
a power of two, half as much again for a block of 350 MB.
"""

from __future__ import annotations

import mmap
import resource
from contextlib import suppress

import torch
from torch import Tensor

from core.errors import EftError
from core.train.memory.available import available_bytes

FIELD = "memory.stream.pinned"


class PinnedRefused(EftError):
    """The system refuses to lock so much memory for this process."""

    code = "pinned_memory_refused"
    status = 422


def host_buffer(nbytes: int, *, pinned: bool, field: str = FIELD) -> Tensor:
    """uint8 [nbytes] in host memory, page-locked with `pinned`: then `unlock` it before it is freed. PinnedRefused,
    naming `field`, when the system refuses that; torch's RuntimeError when there is no memory."""
    if not pinned:
        return torch.empty(nbytes, dtype=torch.uint8)
    buffer = whole_pages(nbytes)
    page_lock(buffer, field)
    return buffer


def whole_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] on pages that no other tensor shares: whole pages are locked and unlocked. torch's RuntimeError
    when there is no memory."""
    page = mmap.PAGESIZE
    raw = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + nbytes]


def page_lock(buffer: Tensor, field: str = FIELD) -> None:
    """Register a CPU tensor's memory; `unlock` it before it is freed. PinnedRefused when the system refuses; `field` is
    the field of the job that turns this off."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        _forget_error()
        raise refused(buffer.nbytes, f"error {code} of cudaHostRegister", field)


def unlock(buffer: Tensor) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())):  # type: ignore[no-untyped-call]
        _forget_error()


def _forget_error() -> None:
    """Clear the last error of the runtime, which keeps it for this thread: torch asks for it after every kernel, and
    would raise it as the next one's."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


def refused(nbytes: int, why: str, field: str = FIELD) -> PinnedRefused:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "" if soft == resource.RLIM_INFINITY else f"; its limit on locked memory is {soft >> 10} KiB"
    return PinnedRefused(
        f"the system refuses to lock {(nbytes >> 20) + 1} MiB more of this box's memory for copies to the GPU "
        f"({why}{limit}): raise the limit (`ulimit -l`, LimitMEMLOCK= of the service), or set "
        f"`{field}` to false, which copies slower",
        field=field,
    )


class HostPool:
    """Host buffers that are given back and taken again, since page-locking takes longer than a copy. A buffer that is
    too small is replaced by one that is large enough."""

    def __init__(self, *, pinned: bool, field: str = FIELD) -> None:
        """`field`: the field of the job that turns page-locking off."""
        self.pinned = pinned
        self.nbytes = 0
        """Size of all buffers, in use or not, bytes."""
        self._field = field
        self._free: list[Tensor] = []
        self._closed = False

    @property
    def in_use(self) -> int:
        """Size of the buffers in use, bytes."""
        return self.nbytes - sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [at least nbytes]. PinnedRefused when the system locks no more memory, MemoryError when there is no
        memory."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if fitting:
            return self._pop(min(fitting, key=lambda buffer: buffer.nbytes))
        if self._free:
            self._drop(self._pop(max(self._free, key=lambda buffer: buffer.nbytes)))
        if (free := available_bytes()) is not None and free < nbytes:
            raise MemoryError(f"{free >> 20} MiB of host memory are free, and a block's input takes {nbytes >> 20}")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer = host_buffer(size, pinned=self.pinned, field=self._field)
        self.nbytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        if self._closed:
            self._drop(buffer)
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Free the buffers that are not in use, and the others when they are given back."""
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
