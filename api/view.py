"""From a row to the JSON of a reply: the fields of a view are written down once, in its model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from pydantic import BaseModel


def iso(seconds: float | None) -> str | None:
    """2026-11-21T09:20:57.120000Z"""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def view_of(model: type[BaseModel], row: object, **given: Any) -> dict[str, Any]:
    """The fields of `model`: those that are `given`, and all others from `row`, whose times are Unix seconds."""
    return {
        name: given[name] if name in given else _read(row, name, field.annotation)
        for name, field in model.model_fields.items()
    }


def _read(row: object, name: str, annotation: Any) -> Any:
    """A number where the view has text is a time."""
    value = getattr(row, name)
    is_text = str in (annotation, *get_args(annotation))
    return iso(value) if is_text and isinstance(value, int | float) else value
