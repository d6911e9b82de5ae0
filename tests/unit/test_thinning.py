"""Curves that are thinned out lose no extreme."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.jobs.views.queries import thin_out

VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400)


@settings(deadline=None)  # a loaded machine is no fault
@given(VALUES, st.integers(4, 60))
def test_every_bucket_keeps_its_extremes_and_the_ends_stay(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = thin_out(points, most)
    assert len(kept) <= most or kept == points
    assert set(kept) <= set(points) and kept == sorted(kept, key=lambda point: point[0])
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert max(value for _, value in kept) == max(values) and min(value for _, value in kept) == min(values)


@settings(deadline=None)
@given(st.integers(100, 3000), st.integers(20, 80), st.data())
def test_every_spike_of_the_full_curve_is_in_the_thinned_one(length: int, most: int, data: st.DataObject) -> None:
    """As many spikes as there are buckets, wherever they stand: one a bucket, up or down, is never lost."""
    buckets = (most - 2) // 2
    inner = length - 2
    points = [(step, 0.0) for step in range(length)]
    spikes = set()
    for bucket in range(buckets):
        low, high = bucket * inner // buckets, (bucket + 1) * inner // buckets
        if low < high:
            at = 1 + data.draw(st.integers(low, high - 1))
            points[at] = (at, data.draw(st.sampled_from([1e9, -1e9, 0.001, -0.001])))
            spikes.add(points[at])
    assert spikes <= set(thin_out(points, most))
