"""Rows of preference stages."""

from __future__ import annotations

from typing import Any


def preferences(count: int) -> list[dict[str, Any]]:
    """Pairs of different lengths."""
    return [
        {
            "prompt": f"count to {n}:" + " go" * (n % 5),
            "chosen": " " + "x" * (n % 7 + 1) + f" {n}",
            "rejected": " no" * (n % 4 + 1) + f" {n}",
        }
        for n in range(count)
    ]


def judged(count: int) -> list[dict[str, Any]]:
    """Answers with labels, two good ones for each bad one."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
        for n, row in enumerate(preferences(count))
    ]
