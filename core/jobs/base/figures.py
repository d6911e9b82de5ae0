"""Figures of a job's result by their names."""

from __future__ import annotations

from typing import Any


def figure(result: dict[str, Any], metric: str) -> float | None:
    """A figure of the weights that a job has handed back; None: the result does not have it."""
    value = (result.get("eval_after") or {}).get(metric, result.get(metric))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
