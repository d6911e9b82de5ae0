"""JSON as the standard has it (RFC 8259), and as strict as a row needs: no doubled keys, no NaN, no endless depth."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import Any

MAX_DEPTH = 60
"""Deepest nesting of lists and objects. All code that reads a row later recurses as deep."""


def decode(value: str) -> Any:
    """Raises ValueError (a JSONDecodeError for a fault of the syntax) or RecursionError."""
    try:
        found = json.loads(value, object_pairs_hook=_no_doubles, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own words are about its settings
            raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits()} digits") from error
        raise
    if value.count("[") + value.count("{") > MAX_DEPTH and _deeper(found):
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return found


def _deeper(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [item for part in parts for item in (part.values() if isinstance(part, dict) else part)]
        depth += bool(parts)
    return depth > MAX_DEPTH


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {double[:40]!r} stands twice in one object")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
