"""What running out of memory looks like, of the host and of a device."""

from __future__ import annotations

import errno
import sys

from safetensors import SafetensorError

_WORDS = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # a process that has not imported it has none of its errors
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError() | SafetensorError():
            return any(words in str(error) for words in _WORDS)
        case _:
            return False
