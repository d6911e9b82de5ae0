"""Bodies of operations of sessions: numpy arrays in safetensors' form, without that library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eft.errors import EftClientError, UsageFault

MEDIA_TYPE = "application/vnd.safetensors"
WHOLE = frozenset({"tokens", "lengths", "targets"})
"""Arrays of whole numbers; all others are float32."""
_TYPES = {"I32": "<i4", "F32": "<f4"}

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Flat arrays with `lengths`, or a list of examples: {"tokens": [...], "weights": [...]}."""


def numpy() -> Any:
    """The library. Raises UsageFault where it is not installed."""
    try:
        import numpy as found
    except ImportError as error:
        raise UsageFault("sessions take and answer numpy arrays: `pip install numpy`") from error
    return found


def flat(batch: Batch) -> dict[str, Any]:
    """Flat arrays of a batch, `lengths` among them. Raises UsageFault for examples that differ in their arrays."""
    np = numpy()
    if isinstance(batch, Mapping):
        return {name: _typed(name, values) for name, values in batch.items()}
    names = set(batch[0]) if batch else set()
    for number, example in enumerate(batch):
        if set(example) != names or "tokens" not in names:
            raise UsageFault(f"example {number} has {sorted(example)}; all have `tokens` and the same others")
        odd = [name for name in names if len(example[name]) != len(example["tokens"])]
        if odd:
            raise UsageFault(f"example {number}: `{odd[0]}` has one number for each of its tokens")
    joined = {name: _typed(name, np.concatenate([np.asarray(one[name]) for one in batch])) for name in sorted(names)}
    return joined | {"lengths": _typed("lengths", [len(one["tokens"]) for one in batch])}


def _typed(name: str, values: Any) -> Any:
    np = numpy()
    array = np.asarray(values)
    if name in WHOLE and array.dtype.kind not in "iu":
        raise UsageFault(f"`{name}` has whole numbers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=_TYPES["I32" if name in WHOLE else "F32"])


def pack(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Make a body."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, at = [], 0
    for name, values in arrays.items():
        raw = values.tobytes()
        kind = "I32" if name in WHOLE else "F32"
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def unpack(body: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and arrays of a body. Raises EftClientError where it is none."""
    np = numpy()
    size = int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8 : 8 + size])
        data = body[8 + size :]
        metadata = header.pop("__metadata__", {})
        arrays = {
            name: np.frombuffer(data[slice(*about["data_offsets"])], dtype=_TYPES[about["dtype"]]).reshape(
                about["shape"]
            )
            for name, about in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EftClientError(f"the server's answer is not valid safetensors: {error}") from error
    return metadata, arrays
