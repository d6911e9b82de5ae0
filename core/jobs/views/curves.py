"""Curves of a job as its metrics answer them. Those of jobs that are over are kept: they do not change any more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from core.db.tables import Job
from core.jobs.base.states import FINAL, Status
from core.jobs.views import queries

Series = dict[str, list[tuple[int, float]]]
KEPT_POINTS = 2_000_000
"""Points of all kept curves together; those that were asked for longest ago go first."""

_kept: OrderedDict[tuple[object, ...], Series] = OrderedDict()
_lock = threading.Lock()


def curves(
    session: Session,
    job: Job,
    names: Sequence[str],
    points: int | None,
    clock: bool,
    first: int | None = None,
    last: int | None = None,
) -> Series:
    """Per name the pairs of step and value, from step `first` to `last`: all, or thinned out to `points` of each; with
    `clock` also `seconds`."""
    key = (job.id, job.attempt, job.finished_at, tuple(names), points, clock, first, last)
    keeps = points is not None and Status(job.status) in FINAL
    if keeps:
        with _lock:
            if (kept := _kept.get(key)) is not None:
                _kept.move_to_end(key)
                return kept
    series: Series = {}
    longest, steps = None, 0
    for name in names or queries.metric_names(session, job.id):
        found = queries.metric_series(session, job.id, name, first, last)
        if len(found) > steps:
            longest, steps = name, len(found)
        if found:
            series[name] = found if points is None else queries.thin_out(found, points)
    if clock and longest is not None:
        times = queries.step_times(session, job.id, longest, first, last)
        series["seconds"] = times if points is None else queries.thin_out(times, points)
    if keeps:
        with _lock:
            _kept[key] = series
            while sum(len(values) for one in _kept.values() for values in one.values()) > KEPT_POINTS:
                _kept.popitem(last=False)
    return series
