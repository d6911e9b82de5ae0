"""Two curves, step by step, and where they are furthest apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LargestDifference:
    """Where a figure of both curves differs most, relative to TRL's."""

    step: int
    ours: float
    trl: float
    absolute: float
    relative: float
    """Share of TRL's value; of 1e-12 where that is smaller."""


def compare(ours: Mapping[int, Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """`{"steps": [{"step", "ours", "trl"}], "largest": {figure: LargestDifference}}`, of the steps that both have and
    the figures that both tell under one name."""
    rows = []
    largest: dict[str, LargestDifference] = {}
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
            here, there = ours[step][name], entry[name]
            apart = abs(here - there)
            found = LargestDifference(step, here, there, apart, apart / max(abs(there), 1e-12))
            if name not in largest or found.relative > largest[name].relative:
                largest[name] = found
    return {"steps": rows, "largest": {name: asdict(value) for name, value in largest.items()}}
