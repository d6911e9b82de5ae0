"""What running out of memory looks like, of the host and of a device."""

from __future__ import annotations

import errno

import torch
from safetensors import SafetensorError

_WORDS = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    match error:
        case torch.OutOfMemoryError() | MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError() | SafetensorError():
            return any(words in str(error) for words in _WORDS)
        case _:
            return False
