"""Looking at a service from outside: its tables by plain SQL, read only, and its trainers in /proc.

Nothing here is shared with the product, so that one mistake cannot hide another.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url

WAITING_OR_OVER = ("queued", "paused", "succeeded", "failed", "cancelled")
SAMPLE_SECONDS = 0.2
AWAY = (sqlite3.Error, psycopg.Error)


class Tables:
    """Read-only SQL on SQLite or PostgreSQL; connects anew after an error. One thread an object."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._connection: Any = None

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Parameters are `?`. Raises one of AWAY."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            if self._url.get_backend_name() == "sqlite":
                return self._connection.execute(query, tuple(parameters)).fetchall()  # type: ignore[no-any-return]
            return self._connection.execute(query.replace("?", "%s"), tuple(parameters)).fetchall()  # type: ignore[no-any-return]
        except AWAY:
            self.close()
            raise

    def _connect(self) -> Any:
        if self._url.get_backend_name() == "sqlite":
            return sqlite3.connect(f"file:{self._url.database}?mode=ro", uri=True, timeout=10, isolation_level=None)
        plain = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = psycopg.connect(plain, autocommit=True, connect_timeout=3)
        connection.read_only = True
        return connection

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*AWAY):  # it was broken already
                self._connection.close()
            self._connection = None


def document(value: Any) -> Any:
    """A JSON column: text in SQLite, already read by psycopg."""
    return json.loads(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Trainer:
    """A living child of a worker with all that it has started: a session."""

    pid: int
    """Process of the session's leader, which gives the session its number."""
    job_id: str
    attempt: int


def trainers(data: Path) -> list[Trainer]:
    """The living children that work in a run folder below `data`."""
    # A helper that one has just forked is called as it is until it executes something else; the ranks of a gang are in
    # their launcher's session.
    found = {Trainer(session, *run) for run, _, session, _ in _processes(data)}
    return sorted(found, key=lambda trainer: trainer.pid)


def ranks(data: Path) -> list[Trainer]:
    """The living ranks of gangs, each with its own number."""
    found = {Trainer(pid, *run) for run, pid, _, module in _processes(data) if module == "core.train.ranks"}
    return sorted(found, key=lambda rank: (rank.job_id, rank.attempt, rank.pid))


def launchers(data: Path) -> list[Trainer]:
    """The launchers of gangs whose ranks live."""
    found = {Trainer(session, *run) for run, _, session, module in _processes(data) if module == "core.train.ranks"}
    return sorted(found, key=lambda launcher: (launcher.job_id, launcher.attempt, launcher.pid))


def _processes(data: Path) -> Iterator[tuple[tuple[str, int], int, int, str]]:
    """((job, attempt), pid, session, module) of what runs a module of the trainer's in a run folder below `data`."""
    below = os.fsencode(data / "runs") + b"/"
    for name in filter(str.isdigit, os.listdir("/proc")):  # many times a second, so without a Path for each
        try:
            with open(f"/proc/{name}/cmdline", "rb", buffering=0) as stream:
                arguments = stream.read().split(b"\0")
        except OSError:
            continue
        if len(arguments) < 4 or arguments[1] != b"-m" or not arguments[2].startswith(b"core.train"):
            continue
        if not arguments[3].startswith(below):
            continue
        job, _, attempt = arguments[3][len(below) :].decode().partition("/attempt-")
        session = _session(int(name))
        if session is not None and attempt.isdigit():
            yield (job, int(attempt)), int(name), session, arguments[2].decode()


def _session(pid: int) -> int | None:
    """The session of a living process; None for one that is gone, waits to be reaped, or is stopped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZXT" else int(fields[3])


@dataclass(frozen=True, slots=True)
class Seen:
    """An event as it was seen while it was new."""

    seq: int
    attempt: int
    type: str
    time: float


class Observer:
    """Samples the running service in a thread of its own: who holds which slot, what runs, which events there are."""

    def __init__(self, url: str, data: Path) -> None:
        self._tables = Tables(url)
        self._data = data
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer")
        self.statuses: dict[str, str] = {}
        self.seen: dict[str, list[Seen]] = {}
        self.final: dict[str, str] = {}
        """Jobs that were seen at their end, and at which."""
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self._slots: dict[tuple[str, int], set[tuple[str, str]]] = {}
        """(job, attempt) → where it runs."""
        self._gpus: dict[str, int] = {}
        self._queued_since: dict[str, float] = {}
        self.longest_wait = 0.0
        """Seconds that a job stood queued in one go."""
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self._tables.close()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._end.wait(SAMPLE_SECONDS):
                try:
                    self._sample()
                except AWAY:
                    self.counts["database away"] += 1
        except BaseException as error:  # told by stop()
            self.error = error

    def _sample(self) -> None:
        before = self._jobs()
        self._leases()
        running = trainers(self._data)
        after = self._jobs()
        self._events(after)
        self._overlaps(running)
        for trainer in running:
            held_by_nobody = [
                seen[trainer.job_id][:2]
                for seen in (before, after)
                if trainer.job_id in seen and seen[trainer.job_id][0] in WAITING_OR_OVER
            ]
            # The same waiting state and attempt before and after: nobody held the job while its process was seen.
            if len(held_by_nobody) == 2 and held_by_nobody[0] == held_by_nobody[1]:
                self.faults.append(f"slots: {trainer} lives, and its job is {held_by_nobody[0]}")
        self.counts["samples"] += 1
        self.counts["trainers seen"] += len(running)

    def _jobs(self) -> dict[str, tuple[str, int, int]]:
        rows = self._tables.rows("SELECT id, status, attempt, event_seq FROM jobs")
        now = time.monotonic()
        for job_id, status, _, _ in rows:
            if status == "queued":
                since = self._queued_since.setdefault(job_id, now)
                self.longest_wait = max(self.longest_wait, now - since)
            else:
                self._queued_since.pop(job_id, None)
            if job_id in self.final and self.final[job_id] != status:
                self.faults.append(f"ends: {job_id} was {self.final[job_id]} and is {status}")
            if status in ("succeeded", "failed", "cancelled"):
                self.final.setdefault(job_id, status)
        gone = set(self.statuses) - {row[0] for row in rows}
        if gone:
            self.faults.append(f"accepted: jobs have vanished: {sorted(gone)}")
        self.statuses = {row[0]: row[1] for row in rows}
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    def _leases(self) -> None:
        rows = self._tables.rows(
            "SELECT l.node, l.slot, l.job_id, l.attempt, a.kind FROM allocations l "
            "JOIN attempts a ON a.job_id = l.job_id AND a.attempt = l.attempt WHERE l.released_at IS NULL"
        )
        held = Counter((node, slot) for node, slot, *_ in rows)
        self.faults.extend(f"slots: {place} is held {count} times" for place, count in held.items() if count > 1)
        of_attempt = Counter((job_id, attempt, kind) for _, _, job_id, attempt, kind in rows)
        attempts = Counter(job_id for job_id, _, _ in of_attempt)
        self.faults.extend(f"slots: {job_id} holds slots twice" for job_id, count in attempts.items() if count > 1)
        for (job_id, attempt, kind), count in of_attempt.items():
            if count != (wanted := self._wants(job_id) if kind == "train" else 1):
                self.faults.append(f"gangs: {job_id} attempt {attempt} holds {count} of {wanted} slots")
            self.counts["gangs seen"] += count > 1
        for node, slot, job_id, attempt, _ in rows:
            self._slots.setdefault((job_id, attempt), set()).add((node, slot))
        self.counts["leases seen"] += len(rows)

    def _wants(self, job_id: str) -> int:
        """Slots that it trains on: a claim takes them in one transaction, so every look sees all of them or none."""
        if job_id not in self._gpus:
            ((spec,),) = self._tables.rows("SELECT spec FROM jobs WHERE id = ?", (job_id,))
            self._gpus[job_id] = document(spec)["resources"]["gpus"]
        return self._gpus[job_id]

    def _events(self, jobs: dict[str, tuple[str, int, int]]) -> None:
        for job_id, (_, _, newest) in jobs.items():
            known = self.seen.setdefault(job_id, [])
            if newest <= len(known):
                continue
            rows = self._tables.rows(
                "SELECT seq, attempt, type, time FROM events WHERE job_id = ? AND seq > ? ORDER BY seq",
                (job_id, len(known)),
            )
            for row in rows:
                if row[0] != len(known) + 1:
                    self.faults.append(
                        f"writers: {job_id} had {len(known)} events, and the next one is number {row[0]}"
                    )
                    return
                known.append(Seen(*row))

    def _overlaps(self, running: list[Trainer]) -> None:
        suspects = []
        for one, other in _pairs(running):
            if one.job_id == other.job_id:
                suspects.append(("two trainers of one job", one, other))
            elif shared := self._places(one) & self._places(other):
                suspects.append((f"two trainers on slot {min(shared)}", one, other))
        if suspects:
            # The list is not of one moment: only if both are in a second one were both there between the two.
            again = set(trainers(self._data))
            self.faults.extend(
                f"slots: {what} at once: {one}, {other}" for what, one, other in suspects if {one, other} <= again
            )

    def _places(self, trainer: Trainer) -> set[tuple[str, str]]:
        key = (trainer.job_id, trainer.attempt)
        if key not in self._slots:
            rows = self._tables.rows("SELECT node, slot FROM allocations WHERE job_id = ? AND attempt = ?", key)
            if rows:
                self._slots[key] = {(node, slot) for node, slot in rows}
        return self._slots.get(key, set())


def _pairs(running: list[Trainer]) -> Iterator[tuple[Trainer, Trainer]]:
    for number, one in enumerate(running):
        for other in running[number + 1 :]:
            yield one, other


@contextmanager
def tables(url: str) -> Iterator[Tables]:
    opened = Tables(url)
    try:
        yield opened
    finally:
        opened.close()
