"""Rows of reward stages."""

from __future__ import annotations

from typing import Any

from tests.support.preferences import preferences


def margins(count: int) -> list[dict[str, Any]]:
    """Pairs of which some say by how much the chosen answer is better."""
    return [row | ({"margin": 0.1 * (n % 4)} if n % 4 else {}) for n, row in enumerate(preferences(count))]


def solutions(count: int) -> list[dict[str, Any]]:
    """Solutions of one to three steps, of which some are wrong."""
    return [
        {
            "prompt": f"what is {n} + 1?" + " hm" * (n % 3),
            "completions": [f"take {n}", f"add {n % 4}", f"so {n + n % 4}"][: n % 3 + 1],
            "labels": [True, n % 4 == 1, n % 4 == 1][: n % 3 + 1],
        }
        for n in range(count)
    ]
