"""The failure class of an error (core/spec/run), its code and its message."""

from __future__ import annotations

from typing import Any

import torch

from core.errors import EftError, NoSpace
from core.spec.run.events import FailureClass
from core.train.base import memory_limit
from core.train.base.disk import disk_failing, disk_full
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.reading import is_panic
from core.train.data.tokenise.helpers import HelperKilled, HelperShort
from core.train.export.handed_back import ArtifactsDiffer
from core.train.memory.streaming.block_source import BlocksLost
from core.train.model.placement import DeviceMissing, DeviceRefused
from core.train.ranks.group import PeerLost, RanksDiverged

_DEVICE_WORDS = ("CUDA error", "HIP error", "cuDNN error", "MIOpen", "NCCL error", "RCCL error")
_BATCH = "training.per_device_train_batch_size"
_EVAL_BATCH = "evaluation.per_device_eval_batch_size"


def describe(error: BaseException, phase: str = "training") -> dict[str, Any]:
    """Make the payload of an error event. `phase`: what the run was doing."""
    if disk_full(error):
        words = error.message if isinstance(error, EftError) else f"no space left: {error}"
        needs = error.needs_bytes if isinstance(error, NoSpace) else None
        return _event("machine", "no_space", words) | ({} if needs is None else {"needs_bytes": needs})
    if disk_failing(error):
        return _event("machine", "storage_failed", f"the file system failed: {error}")
    if isinstance(error, BlocksLost):
        return _event("machine", error.code, error.message, error.field)
    if isinstance(error, EftError):
        faults = [fault.as_dict() for fault in error.faults]
        return _event("user", error.code, error.message, error.field) | ({"faults": faults} if faults else {})
    if is_out_of_memory(error):
        return _out_of_memory(phase) | _held(error, phase)
    if isinstance(error, HelperKilled):
        words = (
            f"{error}, as the kernel does when the box runs out of memory; smaller batches would not help: let fewer"
        )
        return _event("memory", "host_out_of_memory", f"{words} jobs run beside this one, or give it more memory")
    if isinstance(error, HelperShort):
        return _event(
            "memory", "memory_limit", f"{error}; raise that, or look for rows that are far longer than others"
        )
    if isinstance(error, PeerLost):
        return _event("machine", "rank_lost", f"the ranks lost each other: {error}")
    if isinstance(error, RanksDiverged):
        return _event("machine", "ranks_drifted", str(error))
    if isinstance(error, ArtifactsDiffer):
        return _event("machine", "artifacts_differ", str(error))
    if isinstance(error, DeviceMissing):
        return _event("machine", "device_missing", str(error))
    if isinstance(error, DeviceRefused):
        return _event("machine", "device_refused", str(error))
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _DEVICE_WORDS):
        return _event("machine", "device_error", str(error).splitlines()[0])
    if type(error) is Exception or is_panic(error):  # tokenizers, in Rust, has no classes of its own for what it raises
        return _event("user", "model_unreadable", f"the model's tokenizer fails on these rows: {error}", "model")
    return _event("internal", "internal", f"{type(error).__name__}: {error}")


def _held(error: BaseException, phase: str) -> dict[str, Any]:
    """Change the payload where a limit of this process was reached, not the memory of the box or of a device."""
    words = memory_limit.words()
    if words is None or isinstance(error, torch.OutOfMemoryError):
        return {}
    if phase in ("training", "evaluating"):
        return {"message": f"{_out_of_memory(phase)['message']}; {words}"}
    message = f"out of memory while {phase or 'starting'}; {memory_limit.ways()}"
    return {"code": "memory_limit", "message": message}


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
