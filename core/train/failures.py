"""Whose fault an error is, in the words of core/spec/run.py."""

from __future__ import annotations

import errno
from typing import Any

import torch
from safetensors import SafetensorError

from core.errors import EftError, NoSpace
from core.spec.run import FailureClass
from core.train.data.helpers import HelperKilled
from core.train.disk import disk_full
from core.train.export.handed_back import ArtifactsDiffer
from core.train.memory.source import BlocksLost
from core.train.placement import DeviceMissing, DeviceRefused
from core.train.ranks.group import PeerLost, RanksDrifted

_OOM_WORDS = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
_DEVICE_WORDS = ("CUDA error", "HIP error", "cuDNN error", "MIOpen", "NCCL error", "RCCL error")
_BATCH = "training.per_device_train_batch_size"
_EVAL_BATCH = "evaluation.per_device_eval_batch_size"


def describe(error: BaseException, phase: str = "training") -> dict[str, Any]:
    """The payload of an error event. `phase` is where it happened."""
    if disk_full(error):
        words = error.message if isinstance(error, EftError) else f"no space left: {error}"
        needs = error.needs_bytes if isinstance(error, NoSpace) else None
        return _event("machine", "no_space", words) | ({} if needs is None else {"needs_bytes": needs})
    if isinstance(error, BlocksLost):
        return _event("machine", error.code, error.message, error.field)
    if isinstance(error, EftError):
        faults = [fault.as_dict() for fault in error.faults]
        return _event("user", error.code, error.message, error.field) | ({"faults": faults} if faults else {})
    if is_out_of_memory(error):
        return _out_of_memory(phase)
    if isinstance(error, HelperKilled):
        words = (
            f"{error}, as the kernel does when the box runs out of memory; smaller batches would not help: let fewer"
        )
        return _event("memory", "host_out_of_memory", f"{words} jobs run beside this one, or give it more memory")
    if isinstance(error, PeerLost):
        return _event("machine", "rank_lost", f"the ranks lost each other: {error}")
    if isinstance(error, RanksDrifted):
        return _event("machine", "ranks_drifted", str(error))
    if isinstance(error, ArtifactsDiffer):
        return _event("machine", "artifacts_differ", str(error))
    if isinstance(error, DeviceMissing):
        return _event("machine", "device_missing", str(error))
    if isinstance(error, DeviceRefused):
        return _event("machine", "device_refused", str(error))
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _DEVICE_WORDS):
        return _event("machine", "device_error", str(error).splitlines()[0])
    return _event("internal", "internal", f"{type(error).__name__}: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    match error:
        case torch.OutOfMemoryError() | MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError() | SafetensorError():
            return any(words in str(error) for words in _OOM_WORDS)
        case _:
            return False


def _out_of_memory(phase: str) -> dict[str, Any]:
    """The field is the one whose half is tried next; none where the size of a batch makes no difference."""
    match phase:
        case "training":
            words = (
                f"out of memory while training; lower {_BATCH} (or batching.tokens_per_batch) and raise "
                "gradient_accumulation_steps as much"
            )
            return _event("memory", "out_of_memory", words, _BATCH)
        case "evaluating":
            words = f"out of memory while evaluating; lower {_EVAL_BATCH} or training.max_length"
            return _event("memory", "out_of_memory", words, _EVAL_BATCH)
        case _:
            words = (
                f"out of memory while {phase or 'starting'}, before any batch: smaller batches would not help; take a "
                "smaller model, or train adapters instead of all parameters (their base can be streamed: "
                "`memory.stream`)"
            )
            return _event("memory", "out_of_memory", words, "model")


def _event(failure: FailureClass, code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"failure": failure, "code": code, "message": message, "field": field}
