"""JSON as the standard has it (RFC 8259), and as strict as a row needs: no doubled keys, no NaN."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def decode(value: str) -> Any:
    """Raises ValueError (a JSONDecodeError for a fault of the syntax) or RecursionError."""
    return json.loads(value, object_pairs_hook=_no_doubles, parse_constant=_no_constant)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {double[:40]!r} stands twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
