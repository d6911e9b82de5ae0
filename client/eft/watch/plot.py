"""A curve with axes, in characters: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eft.terminal.output import number

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character's dots, by row and column (Unicode 2800)."""
LEAST_WIDTH, LEAST_HEIGHT = 30, 5


def plot(points: Sequence[tuple[int, float]], width: int, height: int, utf8: bool = True) -> list[str]:
    """Lines of a curve of steps and values, with both axes; none where there is too little room, or too little of a
    curve. Values that are not finite are left out."""
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if len(known) < 2 or width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return []
    low, high = min(value for _, value in known), max(value for _, value in known)
    if high == low:
        low, high = low - 0.5, high + 0.5
    rows = height - 1
    labels = {0: number(high), rows // 2: number(high - (high - low) * (rows // 2) / (rows - 1)), rows - 1: number(low)}
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    area = _braille(known, low, high, columns, rows) if utf8 else _stars(known, low, high, columns, rows)
    edge = ("┤", "│") if utf8 else ("+", "|")
    lines = [f"{labels.get(row, ''):>{margin}} {edge[row not in labels]}{line}" for row, line in enumerate(area)]
    first, last = f"step {known[0][0]}", str(known[-1][0])
    return [*lines, " " * (margin + 2) + first + last.rjust(columns - len(first))]


def _heights(points: Sequence[tuple[int, float]], low: float, high: float, columns: int, rows: int) -> list[int | None]:
    """The row from above in which each column's mean lies; between two known columns, the line that joins them."""
    start, span = points[0][0], max(1, points[-1][0] - points[0][0])
    sums: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        sums[round((step - start) / span * (columns - 1))].append(value)
    found: list[int | None] = [None] * columns
    before: tuple[int, float] | None = None
    for column, values in enumerate(sums):
        if not values:
            continue
        mean = sum(values) / len(values)
        for between in range(before[0] + 1 if before else column, column + 1):
            share = (between - before[0]) / (column - before[0]) if before else 1.0
            value = mean if before is None else before[1] + (mean - before[1]) * share
            found[between] = round((high - value) / (high - low) * (rows - 1))
        before = (column, mean)
    return found


def _braille(points: Sequence[tuple[int, float]], low: float, high: float, columns: int, rows: int) -> list[str]:
    cells = [[0] * columns for _ in range(rows)]
    heights = _heights(points, low, high, columns * 2, rows * 4)
    before: int | None = None
    for at, height in enumerate(heights):
        if height is None:
            continue
        reached = range(min(height, before), max(height, before) + 1) if before is not None else (height,)
        for dot in reached:  # a steep fall is a line, too
            cells[dot // 4][at // 2] |= DOTS[dot % 4][at % 2]
        before = height
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row).rstrip() for row in cells]


def _stars(points: Sequence[tuple[int, float]], low: float, high: float, columns: int, rows: int) -> list[str]:
    heights = _heights(points, low, high, columns, rows)
    return ["".join("*" if height == row else " " for height in heights).rstrip() for row in range(rows)]
