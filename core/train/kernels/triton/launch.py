"""What all launches share: the current device, and how many warps make up the wanted number of threads.

Launch settings are fixed, by the number of lanes that run together: 64 on gfx9, 32 on gfx10 and later and on NVIDIA.
Nothing is tuned at run time: that would take seconds at every start, and its choice, hence the order in which numbers
are summed, could differ between two runs of one job.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor


def _nothing() -> None:
    pass


INTERPRETED: bool = not isinstance(triton.jit(_nothing), triton.runtime.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when triton was imported: kernels run on the CPU, for tests."""


def on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def warps(threads: int) -> int:
    """How many warps have so many threads, at least one."""
    if INTERPRETED:
        return 1
    driver = triton.runtime.driver.active
    return max(1, threads // _lanes(driver, driver.get_current_device()))


@cache
def _lanes(driver: Any, device: Any) -> int:
    return int(driver.get_current_target().warp_size)
