"""What is asked of jobs and never changes them. Every function here reads, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, Text, cast, func, select
from sqlalchemy.orm import Session, defer

from core.db.tables import Artifact, Attempt, Event, File, Job, Metric
from core.errors import NotFound
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.states import Status
from core.jobs.kinds import Kind

Point = tuple[int, float, float, int]
"""Step, value, time and attempt of a point of a curve."""


@dataclass(frozen=True, slots=True)
class JobHead:
    """How far a job is: what a watcher must know to see whether there is news."""

    status: Status
    event_seq: int


def jobs_page(
    session: Session,
    project_id: str,
    *,
    statuses: Collection[Status] = (),
    name: str | None = None,
    created_after: float | None = None,
    tags: Collection[str] = (),
    archived: bool = False,
    after: str | None = None,
    limit: int = 20,
) -> ResultPage[Job]:
    """Jobs of a project that have all of `tags`, their specs unread; `archived`: archived ones too. Raises
    UnknownCursor when `after` is no job of it."""
    unread = (defer(Job.spec), defer(Job.submitted))
    query = select(Job).options(*unread).where(Job.project_id == project_id, Job.kind == "train")
    if after is not None:
        known = session.execute(select(Job.id).where(Job.id == after, Job.project_id == project_id)).one_or_none()
        if known is None:
            raise UnknownCursor("`after` is not the id of a job in this project", field="after")
        query = query.where(Job.id < after)
    if statuses:
        query = query.where(Job.status.in_([status.value for status in statuses]))
    if name is not None:
        query = query.where(Job.name == name)
    for tag in tags:  # no tag has a quotation mark, so that no other one ends or begins there
        query = query.where(cast(Job.tags, Text).contains(f'"{tag}"', autoescape=True))
    if not archived:
        query = query.where(Job.archived_at.is_(None))
    if created_after is not None:
        # Times are shown in microseconds: a job is not younger than its own time as shown.
        query = query.where(Job.created_at > created_after + 1e-6)
    rows = session.execute(query.order_by(Job.id.desc()).limit(limit + 1)).scalars().all()
    return ResultPage(rows[:limit], len(rows) > limit)


def files_page(
    session: Session, project_id: str, *, sha256: str | None = None, after: str | None = None, limit: int = 20
) -> ResultPage[File]:
    """Files of a project. Raises UnknownCursor when `after` is no file of it."""
    query = select(File).where(File.project_id == project_id)
    if sha256 is not None:
        query = query.where(File.sha256 == sha256)
    if after is not None:
        known = session.execute(select(File.id).where(File.id == after, File.project_id == project_id)).one_or_none()
        if known is None:
            raise UnknownCursor("`after` is not the id of a file in this project", field="after")
        query = query.where(File.id < after)
    rows = session.execute(query.order_by(File.id.desc()).limit(limit + 1)).scalars().all()
    return ResultPage(rows[:limit], len(rows) > limit)


def find_file(
    session: Session,
    project_id: str,
    file_id: str,
    *,
    field: str = "file_id",
    lock: Literal["share", "delete"] | None = None,
) -> File:
    """A file of the project. Raises NotFound for another project's as for none.

    `share` keeps it from being deleted until the transaction ends; jobs that share files do not wait for one another.
    """
    query = select(File).where(File.id == file_id, File.project_id == project_id)
    if lock is not None:
        query = query.with_for_update(read=lock == "share")  # SQLite has one writer anyway
    row = session.execute(query).scalar_one_or_none()
    if row is None:
        raise NotFound(f"there is no file `{file_id[:60]}` in this project; `GET /files` lists them", field=field)
    return row


def events_after(session: Session, job_id: str, seq: int, limit: int) -> Sequence[Event]:
    """Events behind number `seq`, in their order."""
    return (
        session.execute(select(Event).where(Event.job_id == job_id, Event.seq > seq).order_by(Event.seq).limit(limit))
        .scalars()
        .all()
    )


def newest_events(session: Session, job_id: str, types: Collection[str], limit: int) -> Sequence[Event]:
    """Events of these types, newest first."""
    query = select(Event).where(Event.job_id == job_id, Event.type.in_(types)).order_by(Event.seq.desc()).limit(limit)
    return session.execute(query).scalars().all()


def newest_seq(session: Session, job_id: str) -> int:
    """Number of the newest event; 0 where there is none."""
    return session.execute(select(func.max(Event.seq)).where(Event.job_id == job_id)).scalar_one() or 0


def heads(session: Session, job_ids: Collection[str]) -> dict[str, JobHead]:
    """Status and newest event of many jobs at once; a job that is gone is left out."""
    found: dict[str, JobHead] = {}
    ids = list(job_ids)
    for start in range(0, len(ids), 500):  # SQLite has a limit of parameters
        rows = session.execute(select(Job.id, Job.status, Job.event_seq).where(Job.id.in_(ids[start : start + 500])))
        found.update({row.id: JobHead(Status(row.status), row.event_seq) for row in rows})
    return found


def training_attempts(session: Session, job_ids: Collection[str]) -> dict[str, int]:
    """Count how often each job began to train; jobs that never did are left out."""
    query = select(Attempt.job_id, func.count()).where(Attempt.job_id.in_(list(job_ids)), Attempt.kind == Kind.TRAIN)
    return {row[0]: row[1] for row in session.execute(query.group_by(Attempt.job_id))}


def metric_names(session: Session, job_id: str) -> list[str]:
    """Names of the metrics that the job has, sorted. Each is looked up behind the one before: DISTINCT would read all
    points of the job."""
    found: list[str] = []
    first = select(func.min(Metric.name)).where(Metric.job_id == job_id)
    while (name := session.execute(first.where(Metric.name > found[-1]) if found else first).scalar_one()) is not None:
        found.append(name)
    return found


def metric_series(
    session: Session, job_id: str, name: str, first: int | None = None, last: int | None = None
) -> list[tuple[int, float]]:
    """Values of a metric by step, from step `first` to `last`. Where several attempts did a step, the latest one's
    value stands."""
    kept = Metric.__table__.c
    return _by_step(session, kept.value, kept.name == name, *_range(job_id, first, last))


def step_times(
    session: Session, job_id: str, name: str, first: int | None = None, last: int | None = None
) -> list[tuple[int, float]]:
    """For each step of a metric the seconds from the job's first report of it to that of the step."""
    kept = Metric.__table__.c
    began = first_report(session, job_id, name)
    found = _by_step(session, kept.time, kept.name == name, *_range(job_id, first, last))
    return [(step, round(time - began, 3)) for step, time in found]


def first_report(session: Session, job_id: str, name: str) -> float:
    """When the job told its first step of a metric, whichever attempt did; 0 where it has told none."""
    query = select(Metric.time).where(Metric.job_id == job_id, Metric.name == name)
    found = session.execute(query.order_by(Metric.step, Metric.attempt).limit(1)).scalar_one_or_none()
    return 0.0 if found is None else found


def metric_points(
    session: Session, job_id: str, name: str, first: int | None = None, last: int | None = None
) -> list[Point]:
    """Points of a metric by step, from step `first` to `last`, each as the latest attempt has told it."""
    kept = Metric.__table__.c
    query = select(kept.step, kept.value, kept.time, kept.attempt)
    which = (kept.name == name, *_range(job_id, first, last))
    found = _fetched(session, query.where(*which).order_by(kept.step, kept.attempt))
    attempts = {attempt for _, _, _, attempt in found}
    return found if len(attempts) <= 1 else list({point[0]: point for point in found}.values())


def has_points(session: Session, job_id: str, name: str, count: int) -> bool:
    """Whether the metric has so many points, those of all attempts counted."""
    query = select(Metric.step).where(Metric.job_id == job_id, Metric.name == name)
    return session.execute(query.order_by(Metric.step).offset(count - 1).limit(1)).first() is not None


def _range(job_id: str, first: int | None, last: int | None) -> Iterator[ColumnElement[bool]]:
    kept = Metric.__table__.c
    yield kept.job_id == job_id
    if first is not None:
        yield kept.step >= first
    if last is not None:
        yield kept.step <= last


def _by_step(session: Session, what: ColumnElement[float], *which: ColumnElement[bool]) -> list[tuple[int, float]]:
    kept = Metric.__table__.c
    query = select(kept.step, what).where(*which).order_by(kept.step, kept.attempt)
    rows = _fetched(session, query)
    latest = dict(rows)  # the last one of each step
    return rows if len(latest) == len(rows) else list(latest.items())


def _fetched(session: Session, query: Select[Any]) -> list[Any]:
    """The driver's own tuples: rows of SQLAlchemy would be three quarters of the time of a curve of 100,000 steps."""
    cursor = session.connection().execute(query).cursor
    assert cursor is not None
    rows = list(cursor.fetchall())
    cursor.close()
    return rows


def metric_at(session: Session, job_id: str, name: str, step: int) -> float | None:
    """Value of a metric at a step, as the latest attempt has told it; None where it has not."""
    query = select(Metric.value).where(Metric.job_id == job_id, Metric.name == name, Metric.step == step)
    return session.execute(query.order_by(Metric.attempt.desc()).limit(1)).scalar_one_or_none()


def metric_peak(session: Session, job_id: str, name: str) -> float | None:
    """Largest value of a metric in any attempt; None where there is none."""
    query = select(func.max(Metric.value)).where(Metric.job_id == job_id, Metric.name == name)
    return session.execute(query).scalar_one_or_none()


def metric_figures(session: Session, job_ids: Collection[str], name: str) -> dict[str, tuple[float, float, float]]:
    """Last, smallest and largest value of a metric, for each of the jobs that have it. Where several attempts did a
    step, the latest one's value counts."""
    newest = func.row_number().over(partition_by=[Metric.job_id, Metric.step], order_by=Metric.attempt.desc())
    of_jobs = (Metric.job_id.in_(list(job_ids)), Metric.name == name)
    curve = select(Metric.job_id, Metric.step, Metric.value, newest.label("place")).where(*of_jobs).subquery()
    stands = select(curve).where(curve.c.place == 1).subquery()
    job, value = stands.c.job_id, stands.c.value
    every = select(
        job,
        func.first_value(value).over(partition_by=job, order_by=stands.c.step.desc()).label("last"),
        func.min(value).over(partition_by=job).label("least"),
        func.max(value).over(partition_by=job).label("most"),
    ).distinct()
    return {row.job_id: (row.last, row.least, row.most) for row in session.execute(every)}


def artifacts(session: Session, job_id: str) -> Sequence[Artifact]:
    """What the job has handed back."""
    return session.execute(select(Artifact).where(Artifact.job_id == job_id).order_by(Artifact.path)).scalars().all()


def find_artifact(session: Session, job_id: str, path: str) -> Artifact | None:
    """What the job has listed under the path, whatever may lie on the disk; None: nothing."""
    query = select(Artifact).where(Artifact.job_id == job_id, Artifact.path == path)
    return None if "\0" in path else session.execute(query).scalar_one_or_none()


def thin_out(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points that keep first, last and the extremes: min-max buckets.

    The points between first and last are cut into (most - 2) / 2 runs of equal length; of each the smallest and
    the largest value stay, in the order of their steps. Neither a spike nor a dip is lost.
    """
    if len(points) <= most:
        return list(points)
    if most <= 2:
        return [points[0], points[-1]][:most]
    inner, buckets = len(points) - 2, max(1, (most - 2) // 2)
    values = [value for _, value in points]  # searched by the interpreter's own loops, as a curve may have a million
    kept = [points[0]]
    for bucket in range(buckets):
        begin = 1 + bucket * inner // buckets
        run = values[begin : 1 + (bucket + 1) * inner // buckets]
        low, high = run.index(min(run)), run.index(max(run))
        kept.extend(points[begin + index] for index in ([high] if most == 3 else sorted({low, high})))
    kept.append(points[-1])
    return kept


def samples(session: Session, job_id: str) -> dict[int, list[dict[str, Any]]]:
    """Step → the samples of its evaluation, as the latest attempt has written them."""
    query = select(Event.data).where(Event.job_id == job_id, Event.type == "samples").order_by(Event.seq)
    return {data["step"]: data["samples"] for data in session.execute(query).scalars()}
