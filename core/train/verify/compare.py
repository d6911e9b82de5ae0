"""Two curves, step by step, and where they are furthest apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LargestDifference:
    """Where a figure of both curves differs most, by `relative`."""

    step: int
    ours: float
    trl: float
    absolute: float
    relative: float
    """Share of TRL's value. A figure that is 0 or changes its sign (a margin, an accuracy) has no such share near 0:
    there, share of the mean size of TRL's values; the absolute difference where these are all 0."""


def compare(ours: Mapping[int, Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """`{"steps": [{"step", "ours", "trl"}], "largest": {figure: LargestDifference}}`, of the steps that both have and
    the figures that both tell under one name."""
    rows = []
    pairs: dict[str, list[tuple[int, float, float]]] = {}
    for entry in theirs:
        step = int(entry["step"])
        if step not in ours:
            continue
        shared = [name for name in entry if name in ours[step] and name not in ("step", "epoch")]
        rows.append(
            {
                "step": step,
                "ours": {name: ours[step][name] for name in shared},
                "trl": {name: entry[name] for name in shared},
            }
        )
        for name in shared:
            pairs.setdefault(name, []).append((step, ours[step][name], entry[name]))
    return {"steps": rows, "largest": {name: asdict(_largest(values)) for name, values in pairs.items()}}


def _largest(values: Sequence[tuple[int, float, float]]) -> LargestDifference:
    """The first step of the largest difference, from (step, ours, TRL's) of each."""
    peers = [there for _, _, there in values]
    scale = None if min(peers) > 0 or max(peers) < 0 else sum(map(abs, peers)) / len(peers) or 1.0
    found = []
    for step, here, there in values:
        apart = abs(here - there)
        found.append(LargestDifference(step, here, there, apart, apart / (scale or abs(there))))
    return max(found, key=lambda one: one.relative)
