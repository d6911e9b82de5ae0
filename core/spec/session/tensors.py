"""Arrays in safetensors' form, without a library: the bodies of operations."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import SpecError

MEDIA_TYPE = "application/vnd.safetensors"
MOST_HEADER = 1 << 20
MOST_EXAMPLES = 1 << 16
"""Examples of one operation; more are sent in parts, whose gradients add up."""
NOT_VALID = "the body is not valid safetensors"
WHOLE = frozenset({"tokens", "lengths", "targets"})
"""Arrays of whole numbers; all others are float32."""
_CODES = {"I32": "i", "F32": "f"}


def pack(
    arrays: Mapping[str, Sequence[float]],
    metadata: Mapping[str, str] | None = None,
    columns: Mapping[str, int] | None = None,
) -> bytes:
    """Make a body of lists of numbers; `columns`: of arrays that have rows. SpecError for what is not one."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, at = [], 0
    for name, values in arrays.items():
        kind = "I32" if name in WHOLE else "F32"
        try:
            raw = array(_CODES[kind], values).tobytes()
        except (TypeError, ValueError, OverflowError) as error:
            words = f"`{name}` is not a list of {'whole numbers of 32 bits' if kind == 'I32' else 'numbers'}: {error}"
            raise SpecError(words, field=f"arrays.{name}", code="invalid_value") from error
        wide = (columns or {}).get(name)
        shape = [len(values)] if wide is None else [len(values) // wide, wide]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    return join(header, b"".join(parts))


def join(header: Mapping[str, Any], data: bytes) -> bytes:
    """A body of its header and its data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def split(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a body. SpecError for anything else."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > MOST_HEADER or size > len(body) - 8:
        raise SpecError(f"{NOT_VALID}: its header is cut short", field="body", code="invalid_tensors")
    try:
        header = json.loads(body[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{NOT_VALID}: {error}", field="body", code="invalid_tensors") from error
    if not isinstance(header, dict):
        raise SpecError(f"{NOT_VALID}: its header is not an object", field="body", code="invalid_tensors")
    return header, body[8 + size :]


def check_examples(count: int, field: str) -> None:
    """Raises SpecError for more examples than one operation may have."""
    if count > MOST_EXAMPLES:
        words = f"an operation has {MOST_EXAMPLES:,} examples at most: send them in parts, whose gradients add up"
        raise SpecError(words, field=field, code="too_many_examples")


def count(body: bytes) -> int:
    """Examples that a body says it has; 0 where it does not say so."""
    about = split(body)[0].get("lengths") if body else None
    match about:
        case {"shape": [int() as examples]}:
            return examples
    return 0


def unpack(body: bytes) -> dict[str, list[float]]:
    """Lists of a body that the child of a session made."""
    header, data = split(body)
    found: dict[str, list[float]] = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            found[name] = [*array(_CODES[about["dtype"]], data[begin:end])]
    return found
