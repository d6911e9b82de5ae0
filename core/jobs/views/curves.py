"""Curves of a job as its metrics answer them. Those of jobs that are over are kept: they do not change any more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import Job
from core.jobs.base.states import FINAL, Status
from core.jobs.views import queries
from core.storage.layout import Layout

if TYPE_CHECKING:  # it brings numpy, which a worker does without until it has a long curve
    from core.jobs.views.levels import Level

Series = dict[str, list[tuple[int, float]]]
KEPT_POINTS = 2_000_000
"""Points of all kept curves together; those that were asked for longest ago go first."""
LONG = 4096
"""Points from which on a curve is thinned out into a file (levels.py)."""
RUN = 32
"""Points of which two are kept there."""
GROWTH = 1 / 8
"""While a job runs, its file is written again when a curve has grown by that share."""

_kept: OrderedDict[tuple[object, ...], Series] = OrderedDict()
_lock = threading.Lock()
_whole_curve = threading.Lock()
"""Held while a curve is read whole. SQLite's driver gives the interpreter up at every row, so that threads which read
at once spend their time on handing it over."""


def curves(
    session: Session,
    layout: Layout,
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
    names = names or queries.metric_names(session, job.id)
    if points is None:
        series = _whole(session, job.id, names, clock, first, last)
    else:
        series = _thinned(session, layout.curves(job.id), job, names, points, clock, first, last)
    if keeps:
        with _lock:
            _kept[key] = series
            while sum(len(values) for one in _kept.values() for values in one.values()) > KEPT_POINTS:
                _kept.popitem(last=False)
    return series


def prepare(database: Database, layout: Layout, job_id: str) -> None:
    """Thin the long curves of a job out into its file, before anybody looks at them: those of an ended job whole, those
    of another as far as they are settled."""
    with database.read() as session:
        job = session.get(Job, job_id)
        if job is None:
            return
        names = queries.metric_names(session, job_id)
        long = [name for name in names if queries.has_points(session, job_id, name, LONG)]
        if long:
            _thinned(session, layout.curves(job_id), job, long, 2, False)


def _whole(
    session: Session, job_id: str, names: Sequence[str], clock: bool, first: int | None, last: int | None
) -> Series:
    found = {name: queries.metric_series(session, job_id, name, first, last) for name in names}
    series = {name: values for name, values in found.items() if values}
    if clock and series:
        longest = max(series, key=lambda name: len(series[name]))
        series["seconds"] = queries.step_times(session, job_id, longest, first, last)
    return series


def _thinned(
    session: Session,
    file: Path,
    job: Job,
    names: Sequence[str],
    points: int,
    clock: bool,
    first: int | None = None,
    last: int | None = None,
) -> Series:
    series: Series = {}
    longest, steps, times = "", 0, list[tuple[int, float]]()
    stored = _StoredCurves(session, file, job)
    for name in names:
        if first is None and last is None:
            found, rows = stored.curve(name, points)
        else:
            found, rows = stored.part(name, points, first, last)
        if found:
            series[name] = queries.thin_out([(step, value) for step, value, _, _ in found], points)
        if clock and rows > steps:
            longest, steps, times = name, rows, [(step, time) for step, _, time, _ in found]
    stored.save()
    if times:
        began = queries.first_report(session, job.id, longest)
        series["seconds"] = [(step, round(time - began, 3)) for step, time in queries.thin_out(times, points)]
    return series


class _StoredCurves:
    """The curves of a job, as far as its file has them and otherwise from the database."""

    def __init__(self, session: Session, file: Path, job: Job) -> None:
        self._session = session
        self._file = file
        self._job = job
        self._over = Status(job.status) in FINAL
        self._levels: dict[str, Level] = {}
        self._grown = False
        if file.exists():
            from core.jobs.views import levels

            self._levels = levels.load(file, job.attempt)

    def curve(self, name: str, points: int) -> tuple[list[queries.Point], int]:
        """Points that suffice to be thinned out to so many, and of how many they are."""
        level = self._levels.get(name)
        found = []
        if level is not None:
            found = queries.metric_points(self._session, self._job.id, name, level.last[0])
            if not found or found[0][:2] != level.last:
                del self._levels[name]
                level = None
        if level is None:
            with _whole_curve:
                found = queries.metric_points(self._session, self._job.id, name)
        if level is None and len(found) < LONG:
            return found, len(found)
        from core.jobs.views import levels

        more = found if level is None else found[1:]
        longer = levels.extended(level, more, len(more) if self._over else self._settled(more), RUN)
        if longer is None:
            return found, len(found)
        grown = longer.rows - (0 if level is None else level.rows)
        if grown:
            self._levels[name] = longer
            self._grown |= self._over or grown > GROWTH * longer.rows
        rest = more[grown:]
        rows = longer.rows + len(rest)
        if len(longer.kept) < 2 * points:  # too coarse for so many
            return (found if level is None else queries.metric_points(self._session, self._job.id, name)), rows
        kept = longer.kept.tolist()
        end = more[grown - 1] if grown else found[0]
        return [*kept, *([end] if end[0] > kept[-1][0] else []), *rest], rows

    def part(self, name: str, points: int, first: int | None, last: int | None) -> tuple[list[queries.Point], int]:
        """As `curve`, from step `first` to `last`. The file is read, but not made longer."""

        def read(begin: int | None, end: int | None) -> list[queries.Point]:
            return queries.metric_points(self._session, self._job.id, name, begin, end)

        kept = [] if (level := self._levels.get(name)) is None else level.between(first, last)
        if len(kept) >= max(2 * points, 6):
            # The runs at both ends may have their extremes outside: they are read.
            inner = kept[2:-2]
            begin, end = read(first, inner[0][0]), read(inner[-1][0], last)
            if begin and end and begin[-1] == inner[0] and end[0] == inner[-1]:
                return [*begin, *inner[1:-1], *end], len(begin) + len(inner) * RUN // 2 + len(end)
        found = read(first, last)
        return found, len(found)

    def _settled(self, points: Sequence[queries.Point]) -> int:
        """How many of them will not change: those before the newest step of this attempt. It may tell that one again,
        and those behind it, which earlier attempts did, are still to be done again."""
        return next((at for at in range(len(points) - 1, -1, -1) if points[at][3] == self._job.attempt), 0)

    def save(self) -> None:
        """Keep what is new."""
        if self._grown:
            from core.jobs.views import levels

            levels.save(self._file, self._job.attempt, self._levels)
