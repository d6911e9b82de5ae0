"""Choices of cases that make a run cheaper: `EFT_TEST_EVERYTHING=1 make test` takes all of them (every night, say).

Two rules. Where cases are a product of axes, every pair of values of two axes occurs once at least: a fault needs one
value or two together far more often than three. Where a test costs minutes and its cases differ in their surroundings
alone, a run takes one of them, and the commit decides which.
"""

from __future__ import annotations

import heapq
import os
import subprocess
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

EVERYTHING = os.environ.get("EFT_TEST_EVERYTHING") == "1"


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of the axes' product in which every pair of values of two axes occurs, the same ones at every call."""
    rows = list(product(*axes))
    return rows if EVERYTHING else covering(rows)


def covering(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those of the rows in which every pair of values occurs that occurs in any of them.

    Greedy: the next row is the first of those with the most pairs that no row has had yet.
    """
    if not rows:
        return []
    places = list(combinations(range(len(rows[0])), 2)) or [(0, 0)]
    pairs = [{(one, other, repr(row[one]), repr(row[other])) for one, other in places} for row in rows]
    missing, chosen = set().union(*pairs), list[int]()
    bounds = [(-len(own), number) for number, own in enumerate(pairs)]  # a row's count only falls
    heapq.heapify(bounds)
    while missing:
        best = heapq.heappop(bounds)[1]
        now = (-len(pairs[best] & missing), best)
        if bounds and now > bounds[0]:
            heapq.heappush(bounds, now)
            continue
        chosen.append(best)
        missing -= pairs[best]
    return [rows[number] for number in sorted(chosen)]


def one_in(count: int, cases: Sequence[Any]) -> list[Any]:
    """Every `count`-th of the cases, from the first on."""
    return list(cases if EVERYTHING else cases[::count])


def one_a_commit(*cases: Any) -> list[Any]:
    """The case whose turn it is at this commit; the first one where there is no commit."""
    if EVERYTHING:
        return list(cases)
    root = Path(__file__).resolve().parent.parent.parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return [cases[int(found.stdout.strip() or "0", 16) % len(cases)]]
