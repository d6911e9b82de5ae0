"""Page-locked host memory: what a GPU copies from by itself, while the processor does something else.

Memory that is there already is registered with the driver (cudaHostRegister, CUDA Runtime API, "Memory Management";
hipHostRegister answers to the same name in torch for ROCm). torch's own pinned allocator would round each buffer up to
a power of two, half as much again for a block of 350 MB.
"""

from __future__ import annotations

import mmap
import resource

import torch
from torch import Tensor

from core.errors import EftError

FIELD = "memory.stream.pinned"


class PinnedRefused(EftError):
    """The system does not lock so much memory for this process."""

    code = "pinned_memory_refused"
    status = 422


def whole_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] on pages of its own: what is locked and unlocked are pages, and a neighbour's may be among them.
    RuntimeError, as torch's, when there is no memory."""
    page = mmap.PAGESIZE
    raw = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + nbytes]


def page_lock(buffer: Tensor, field: str = FIELD) -> None:
    """Register a CPU tensor's memory, to be unlocked before it is freed. PinnedRefused when the system will not;
    `field` of the job is the one that does without."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        raise refused(buffer.nbytes, f"error {code} of cudaHostRegister", field)


def unlock(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


def refused(nbytes: int, why: str, field: str = FIELD) -> PinnedRefused:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "" if soft == resource.RLIM_INFINITY else f"; its limit on locked memory is {soft >> 10} KiB"
    return PinnedRefused(
        f"the system refuses to lock {(nbytes >> 20) + 1} MiB more of this box's memory for copies to the GPU "
        f"({why}{limit}): raise the limit (`ulimit -l`, LimitMEMLOCK= of the service), or set "
        f"`{field}` to false, which copies slower",
        field=field,
    )
