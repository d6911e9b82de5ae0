"""Whose fault an error is, in the words of core/spec/run.py."""

from __future__ import annotations

import errno
from typing import Any

import torch

from core.errors import EftError
from core.spec.run import FailureClass
from core.train.placement import DeviceMissing

_CPU_OOM = ("can't allocate memory", "not enough memory")
_DEVICE_WORDS = ("CUDA error", "HIP error", "cuDNN error", "MIOpen", "NCCL error", "RCCL error")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def describe(error: BaseException) -> dict[str, Any]:
    """The payload of an error event."""
    if isinstance(error, EftError):
        faults = [fault.as_dict() for fault in error.faults]
        return _event("user", error.code, error.message, error.field) | ({"faults": faults} if faults else {})
    if is_out_of_memory(error):
        return _event(
            "memory",
            "out_of_memory",
            "out of memory; lower training.per_device_train_batch_size (and raise gradient_accumulation_steps as "
            "much), lower training.max_length, or set memory.gradient_checkpointing",
            "training.per_device_train_batch_size",
        )
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return _event("machine", "no_space", f"no space left for {error.filename or 'the run'}")
    if isinstance(error, DeviceMissing):
        return _event("machine", "device_missing", str(error))
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _DEVICE_WORDS):
        return _event("machine", "device_error", str(error).splitlines()[0])
    return _event("internal", "internal", f"{type(error).__name__}: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_OOM)


def _event(failure: FailureClass, code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"failure": failure, "code": code, "message": message, "field": field}
