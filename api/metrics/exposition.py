"""Prometheus' text format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(slots=True)
class Histogram:
    """Counts by upper bounds; the last is infinity."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """Count of each bucket alone; one more than there are bounds."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        place = next((place for place, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[place] += 1
        self.total += value


@dataclass(slots=True)
class Family:
    """A metric with all its series."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    lines: list[str] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        self.lines.append(f"{self.name}{_labels(labels)} {number(value)}")

    def add_histogram(self, histogram: Histogram, **labels: str) -> None:
        below = 0
        for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
            below += count
            self.lines.append(f"{self.name}_bucket{_labels({**labels, 'le': number(bound)})} {below}")
        self.lines.append(f"{self.name}_sum{_labels(labels)} {number(histogram.total)}")
        self.lines.append(f"{self.name}_count{_labels(labels)} {below}")

    def text(self) -> str:
        words = self.help.replace("\\", "\\\\").replace("\n", "\\n")
        return "\n".join([f"# HELP {self.name} {words}", f"# TYPE {self.name} {self.kind}", *self.lines]) + "\n"


def page(families: Sequence[Family]) -> str:
    """All of one scrape."""
    return "".join(family.text() for family in families)


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
