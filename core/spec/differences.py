"""What differs between jobs, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differences(specs: Sequence[Mapping[str, Any]], missing: Any = None) -> dict[str, list[Any]]:
    """The dotted paths on which resolved specs are not all equal, each with the value of every spec; `missing` where a
    spec does not have it. 1, 1.0 and true differ."""
    columns = [_flat(spec) for spec in specs]
    paths = dict.fromkeys(path for column in columns for path in column)
    values = {path: [column.get(path, missing) for column in columns] for path in paths}
    return {path: each for path, each in values.items() if any(_differ(value, each[0]) for value in each[1:])}


def _differ(one: Any, other: Any) -> bool:
    return one != other or type(one) is not type(other)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """A spec as dotted paths and plain values."""
    if isinstance(value, Mapping) and value:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}
