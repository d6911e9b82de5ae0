"""The service's own scheduler through a week in a minute: core/jobs as it is, on SQLite, with a simulated clock.

Submit, claim, lease, the trainers' reports, the end of an attempt and the books are the functions that the API, the
worker and the housekeeper call, in the order in which a worker calls them. Not there are processes, models (every job
is as good as prepared) and faults: chaos has those. A trainer tells what it has left once it has loaded, `WRONG_BY`
off, holds its GPUs for the task's seconds, and when it is asked to leave it is gone `LEAVES_AFTER` later, having kept
all that it had done.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from bench.lab.peers import Outcome
from bench.lab.week import Task
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Job, Limit, Project, User
from core.jobs.base.slots import Slot
from core.jobs.lifecycle import claims, relay
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, submit
from core.jobs.policies import nodes, usage
from core.jobs.scheduling import preempt
from core.spec.job import JobSpec
from core.spec.resolve import resolve

MONDAY = 1_767_571_200.0
"""2026-01-05 00:00 UTC: when the week begins."""
NODE, WORKER = "box", "worker-of-box"
LEASE = 90.0
BOOKS_EVERY = 600.0
LOADS_FOR = 30.0
"""Until its first step, each time that it starts."""
LEAVES_AFTER = 20.0
WRONG_BY = 0.1
RULES = preempt.PreemptionSettings(min_seconds=600.0, silent_after=LEASE)
GPU: dict[str, Any] = {"vendor": "amd", "arch": "gfx942", "memory_bytes": 192 << 30}


@dataclass(slots=True)
class Run:
    """What the service made of a task."""

    outcome: Outcome
    slots: list[tuple[str, ...]] = field(default_factory=list)
    """Of each of its spans."""
    left: float = 0.0
    """Seconds that it has still to hold its GPUs for."""


class Week:
    """One week on one box. `limits`: columns of the limits of owners and projects, by (scope, name); every owner has a
    project of the same name."""

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[Task],
        gpus: int = 8,
        *,
        limits: dict[tuple[str, str], dict[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        self.now = MONDAY
        self.database = Database(f"sqlite:///{folder / 'week.db'}", clock=lambda: self.now)
        self.runs = {task.name: Run(Outcome(task), left=task.seconds) for task in tasks}
        self._slots = [Slot(f"GPU-{number}", "gpu", "amd", "gfx942", 192 << 30) for number in range(gpus)]
        self._dice = random.Random(seed)  # noqa: S311 -- no secret
        self._names: dict[str, str] = {}
        self._specs: dict[tuple[int, int | None, int], JobSpec] = {}
        self._busy: dict[str, Claim] = {}
        """Slot → what holds it."""
        self._leaving: set[str] = set()
        self._preempts = any(values.get("preemptible") for values in (limits or {}).values())
        self._waiting = 0
        self._agenda: list[tuple[float, int, str, Any]] = []
        self._count = 0
        migrate.upgrade(self.database)
        self._found({task.owner for task in tasks}, limits or {})
        for task in tasks:
            self._at(MONDAY + task.submit, "submit", task)
        self._at(MONDAY + BOOKS_EVERY, "books", None)

    def run(self) -> list[Run]:
        """To the end of the last job."""
        while self._agenda:
            self.now = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] <= self.now:
                _, _, what, whom = heapq.heappop(self._agenda)
                getattr(self, f"_{what}")(whom)
            if self._waiting:
                self._live()
                self._claim()
                self._preempt()
            self._look_for_wishes()
        return list(self.runs.values())

    def close(self) -> None:
        self.database.dispose()

    def _at(self, when: float, what: str, whom: Any) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (when, self._count, what, whom))

    def _found(self, owners: set[str], limits: dict[tuple[str, str], dict[str, Any]]) -> None:
        with self.database.write() as session:
            for owner in sorted(owners):
                session.execute(insert(User).values(id=f"user-{owner}", name=owner))
                session.execute(insert(Project).values(id=f"proj-{owner}", name=owner))
            for (scope, name), values in limits.items():
                subject = f"{'proj' if scope == 'project' else 'user'}-{name}"
                session.execute(insert(Limit).values(scope=scope, subject_id=subject, **values))
            described = [
                {"id": slot.id, "kind": "gpu", "gpu": {**GPU, "index": number, "uuid": slot.id}}
                for number, slot in enumerate(self._slots)
            ]
            nodes.register(session, NODE, WORKER, "0", described, [])

    # -- what happens

    def _submit(self, task: Task) -> None:
        kind = (task.gpus, task.limit, task.priority)
        if kind not in self._specs:
            wish = {"type": "single", "gpus": task.gpus, "max_runtime_seconds": task.limit}
            document = {"model": "team/tiny", "data": f"file-{'0' * 26}", "priority": task.priority, "resources": wish}
            self._specs[kind] = resolve(JobSpec.model_validate(document))
        with self.database.write() as session:
            row = submit(session, Actor(f"user-{task.owner}", f"proj-{task.owner}"), self._specs[kind])
            row.prepared = {"model_dir": "models/tiny"}
            self._names[row.id] = task.name
        self._waiting += 1

    def _live(self) -> None:
        """A sign of life of the node, as of this moment: nothing looks at it in between."""
        with self.database.write() as session:
            nodes.heartbeat(session, NODE, WORKER)

    def _claim(self) -> None:
        """As worker/agent/agent.py does: from the first free slot on, again after every job that is won."""
        won = True
        while won and self._waiting:
            won = False
            for slot in [slot for slot in self._slots if slot.id not in self._busy]:
                beside = [one for one in self._slots if one.id not in self._busy]
                with self.database.write() as session:
                    claim = claims.claim(session, WORKER, NODE, slot, LEASE, beside=beside)
                if claim is not None:
                    self._start(claim)
                    won = True
                    break

    def _start(self, claim: Claim) -> None:
        run = self.runs[self._names[claim.token.job_id]]
        names = tuple(slot.id for slot in claim.slots)
        taken = [name for name in names if name in self._busy]
        if taken or len(names) != run.outcome.task.gpus:
            raise AssertionError(f"{claim.label} was given {names}, of which {taken} are somebody else's")
        self._busy.update(dict.fromkeys(names, claim))
        self._waiting -= 1
        again = LOADS_FOR if run.outcome.spans else 0.0
        run.left += again
        run.outcome.spans.append((self.now - MONDAY, self.now - MONDAY + run.left))
        run.slots.append(names)
        self._at(self.now + min(LOADS_FOR, run.left / 2), "tell", claim)
        self._at(self.now + run.left, "end", claim)

    def _tell(self, claim: Claim) -> None:
        """The trainer's first step, and what it thinks is left."""
        run = self.runs[self._names[claim.token.job_id]]
        left = (run.outcome.end - (self.now - MONDAY)) * self._dice.uniform(1 - WRONG_BY, 1 + WRONG_BY)
        steps = {"step": 1, "total_steps": 1000}
        lines: list[dict[str, Any]] = [
            {"type": "metrics", "time": self.now, "values": {"loss": 1.0}, **steps},
            {"type": "progress", "time": self.now, "seconds_left": left, **steps},
        ]
        with self.database.write() as session:
            claims.running(session, claim.token)
            relay.relay(
                session, claim.token, relay.EventBatch(1, [{"seq": 1 + at, **line} for at, line in enumerate(lines)])
            )

    def _end(self, claim: Claim) -> None:
        if self._busy.get(claim.slots[0].id) is not claim or claim.token.job_id in self._leaving:
            return  # it was made to leave before
        with self.database.write() as session:
            finish(session, claim.token, claim.kind, Succeeded({}), 0, RetryPolicy())
        self._gone(claim)

    def _leave(self, claim: Claim) -> None:
        run = self.runs[self._names[claim.token.job_id]]
        since, _ = run.outcome.spans[-1]
        run.outcome.spans[-1] = (since, self.now - MONDAY)
        run.left = max(1.0, run.left - (self.now - MONDAY - LEAVES_AFTER - since))
        with self.database.write() as session:
            finish(session, claim.token, claim.kind, Requeued("left its slots to others"), 75, RetryPolicy())
        self._leaving.discard(claim.token.job_id)
        self._gone(claim)
        self._waiting += 1

    def _gone(self, claim: Claim) -> None:
        for slot in claim.slots:
            del self._busy[slot.id]

    def _books(self, _: None) -> None:
        """The housekeeper's sweep, more rarely."""
        with self.database.write() as session:
            usage.charge(session, limit=5000)
        if self._agenda or self._busy:
            self._at(self.now + BOOKS_EVERY, "books", None)

    def _preempt(self) -> None:
        """The housekeeper's, at every sweep."""
        if not self._preempts or not self._waiting:
            return
        with self.database.read() as session:
            possible = preempt.possible(session)
        if possible:
            with self.database.write() as session:
                preempt.ask(session, RULES)

    def _look_for_wishes(self) -> None:
        """Who was asked to leave; a worker sees it when it renews its leases."""
        if not self._busy:
            return
        with self.database.read() as session:
            asked = set(session.execute(select(Job.id).where(Job.stop_requested.is_not(None))).scalars())
        for claim in {id(one): one for one in self._busy.values()}.values():
            if claim.token.job_id in asked - self._leaving:
                self._leaving.add(claim.token.job_id)
                self._at(self.now + LEAVES_AFTER, "leave", claim)
