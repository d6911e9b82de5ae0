"""A lab whose jobs take the time they are given, by a clock that jumps from event to event: the real claims, preemption
and ends on a database of its own, for tests of what becomes of whole schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, insert, select, update

from core.db.engine import Database
from core.db.tables import Attempt, Base, Job, Limit
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, Succeeded, finish
from core.jobs.scheduling import cluster, preempt
from tests.support.lab import Lab, gpu

START = 1_700_000_000.0
SILENT = 1e12
LEASE = 1e12


@dataclass(frozen=True)
class Made:
    """A job as a user submits it."""

    name: str
    at: float
    work: float
    """Seconds that it trains."""
    gpus: int = 1
    owner: str = "ada"
    project: str = "lab"
    priority: int = 0
    limit: int | None = None
    told: bool = True
    """Its trainer tells how long it has still to go."""
    box: str | None = None
    """The only node where it may run."""


@dataclass
class Run:
    """An attempt."""

    name: str
    node: str
    slots: tuple[str, ...]
    began: float
    ahead_of: tuple[str, ...]
    """Jobs that had slots kept when it began."""
    ended: float = 0.0
    made_room: bool = False


@dataclass
class Play:
    """One schedule from its first job to its last."""

    database: Database
    clock: list[float]
    boxes: dict[str, int]
    min_seconds: float = 100.0
    preemptible: tuple[str, ...] = ()
    lab: Lab = field(init=False)
    runs: list[Run] = field(default_factory=list)
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)
    """Job → when slots were kept for it first."""
    promised: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    going: dict[str, tuple[Claim, Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock[0] = START
        with self.database.write() as session:
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(delete(table))
        self.lab = Lab(self.database)
        for name, count in self.boxes.items():
            self.lab.box(name, [gpu(n, uuid=f"{name}-{n}") for n in range(count)], [name])
        for project in self.preemptible:
            actor = self.lab.actor("ada", project)
            with self.database.write() as session:
                row = {"scope": "project", "subject_id": actor.project_id, "preemptible": True}
                session.execute(insert(Limit).values(**row))

    @property
    def now(self) -> float:
        return self.clock[0] - START

    def run(self, jobs: Iterable[Made], *, until: float = 1e7) -> None:
        """Until all are over. Raises AssertionError where nothing happens any more."""
        coming = sorted(jobs, key=lambda job: (job.at, job.name))
        works = {job.name: job for job in coming}
        while coming or self.left:
            while coming and coming[0].at <= self.now:
                self._submit(coming.pop(0))
            self._tell(works)
            while self._start() or self._make_room():
                self._tell(works)
            times = [START + job.at for job in coming[:1]]
            times += [run.began + self.left[name] for name, (_, run) in self.going.items()]
            if self.preemptible:
                times += [run.began + self.min_seconds for _, run in self.going.values()]
            later = [time for time in times if time > self.clock[0]]
            assert later and self.now < until, f"stuck at {self.now}: {sorted(self.left)}, {self.going.keys()}"
            self._pass(min(later))

    def _submit(self, job: Made) -> None:
        fields: dict[str, Any] = {"gpus": job.gpus, "priority": job.priority, "limit": job.limit}
        if job.box is not None:
            fields["requirements"] = {"labels": [job.box]}
        job_id = self.lab.job(job.name, job.owner, job.project, **fields)
        self.left[job.name] = job.work
        with self.database.write() as session:  # none is as old as another, whatever order their ids have
            older = START + job.at + 0.001 * len(self.lab.ids)
            session.execute(update(Job).where(Job.id == job_id).values(created_at=older))

    def _tell(self, works: dict[str, Made]) -> None:
        """Every trainer says how long it has to go, and trains from its first second on."""
        with self.database.write() as session:
            for name, (claim, run) in self.going.items():
                left = run.began + self.left[name] - self.clock[0]
                values: dict[str, Any] = {"status": "running"}
                if works[name].told:
                    values |= {"progress": {"seconds_left": left}, "progress_at": self.clock[0]}
                session.execute(update(Job).where(Job.id == claim.token.job_id).values(**values))
                mine = (Attempt.job_id == claim.token.job_id) & (Attempt.attempt == claim.token.attempt)
                session.execute(update(Attempt).where(mine).values(training_at=run.began))

    def _start(self) -> bool:
        """Every free slot of every node asks once, as the workers do."""
        started = False
        with self.database.read() as session:
            seats = [seat for seat in cluster.slot_states(session, self.clock[0], SILENT) if seat.slot.phase == "train"]
        for node in self.boxes:
            free = [seat.slot for seat in seats if seat.node == node and seat.free]
            for slot in list(free):
                if slot not in free:
                    continue
                with self.database.write() as session:
                    claim = claims.claim(session, f"worker-{node}", node, slot, LEASE, beside=free, leave_seconds=0.0)
                self._note_kept()
                if claim is not None:
                    free = [one for one in free if one not in claim.slots]
                    name = self.lab.name(claim.token.job_id)
                    ahead = tuple(
                        one for one in self.kept if one in self.left and one not in self.going and one != name
                    )
                    ids = tuple(one.id for one in claim.slots)
                    self.going[name] = claim, Run(name, node, ids, self.clock[0], ahead)
                    started = True
        return started

    def _note_kept(self) -> None:
        with self.database.read() as session:
            for job_id, since in session.execute(select(Job.id, Job.reserved_at).where(Job.reserved_at.is_not(None))):
                self.kept.setdefault(self.lab.name(job_id), since - START)

    def _make_room(self) -> bool:
        if not self.preemptible:
            return False
        with self.database.write() as session:
            done = preempt.ask(session, preempt.PreemptionSettings(self.min_seconds, SILENT, leave_seconds=0.0))
        for one in done:
            victims = tuple(self.lab.name(job_id) for job_id in one.victims)
            self.asked.append((self.lab.name(one.waiting), victims))
            for name in victims:
                claim, run = self.going.pop(name)
                run.ended, run.made_room = self.clock[0], True
                self.left[name] -= run.ended - run.began
                self.runs.append(run)
                with self.database.write() as session:
                    finish(session, claim.token, "train", Requeued("asked"), 75, RetryPolicy())
        return bool(done)

    def _pass(self, time: float) -> None:
        self.clock[0] = time
        for name, (claim, run) in list(self.going.items()):
            if run.began + self.left[name] <= time + 1e-6:
                del self.going[name], self.left[name]
                run.ended = time
                self.runs.append(run)
                with self.database.write() as session:
                    finish(session, claim.token, "train", Succeeded({"ok": True}), 0, RetryPolicy())

    def began(self, name: str) -> float:
        """When it started first."""
        return min(run.began for run in self.runs if run.name == name) - START
