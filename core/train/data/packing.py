"""Rows into bins of a given capacity: the arithmetic of packing, over lengths alone.

Best fit decreasing: the longest row first, each into the fullest bin that still has room. It needs at most 11/9 of the
fewest possible bins, and one more (Johnson 1973); on rows of text it comes within a bin or two of the sum of tokens.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of rows whose lengths add up to at most `capacity`; a longer row is a bin of its own. Equal input gives
    equal bins. O(n log n)."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, bin), sorted
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        length = lengths[row]
        at = bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([row])
            left, number = capacity - length, len(bins) - 1
        else:
            left, number = room.pop(at)
            left -= length
            bins[number].append(row)
        if left > 0:
            insort(room, (left, number))
    return bins


def spread(rows: Sequence[int], lengths: Sequence[int], capacity: int, *, multiple: int = 1) -> list[list[int]]:
    """The same, but into bins filled alike, and (if there are rows enough) as many as a multiple of `multiple`.

    What best fit leaves in a last, small bin is work that runs badly on a GPU, and uneven bins let ranks wait."""
    tight = best_fit(rows, lengths, capacity)
    wanted = math.ceil(len(tight) / multiple) * multiple
    if wanted > len(rows) or wanted == 1:
        return tight
    # The longest row first, each into the emptiest bin (Graham 1969, LPT).
    bins: list[list[int]] = [[] for _ in range(wanted)]
    emptiest = [(0, number) for number in range(wanted)]
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        held, number = heapq.heappop(emptiest)
        bins[number].append(row)
        heapq.heappush(emptiest, (held + lengths[row], number))
    over = any(len(held) > 1 and sum(lengths[row] for row in held) > capacity for held in bins)
    return tight if over else bins
