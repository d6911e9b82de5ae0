"""A made-up lab in a database: owners, projects, boxes and waiting jobs, for tests of the queue's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select, update

from core.db.engine import Database, db_now
from core.db.tables import Allocation, Attempt, Job, Limit, Project, SlotGuest, UsageTotal, User
from core.jobs.base.shares import SLICE_SECONDS
from core.jobs.base.slots import Slot
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, submit
from core.jobs.policies import nodes
from core.jobs.scheduling import cluster
from core.jobs.views import explain
from core.spec.job import JobSpec
from core.spec.resolve import resolve

GPU: dict[str, Any] = {"index": 0, "vendor": "amd", "uuid": "GPU-0", "arch": "gfx942", "memory_bytes": 192 << 30}
QUEUE_SETTINGS = explain.QueueSettings(silent_after=600.0, leave_seconds=0.0)
CLOCKS = (
    Job.created_at,
    Job.started_at,
    Job.progress_at,
    Job.reserved_at,
    Attempt.started_at,
    Attempt.training_at,
    Attempt.ended_at,
    Allocation.created_at,
    Allocation.released_at,
    SlotGuest.began_at,
    SlotGuest.ended_at,
    UsageTotal.at,
)


def gpu(index: int, **facts: Any) -> dict[str, Any]:
    """A slot as a worker describes it."""
    return {"id": f"GPU-{index}", "kind": "gpu", "gpu": {**GPU, "index": index, "uuid": f"GPU-{index}", **facts}}


@dataclass
class Lab:
    """Owners and projects are made as they are named; a job without a project is of `lab`."""

    database: Database
    ids: dict[str, str] = field(default_factory=dict)
    """Name of a job → its id."""
    held: dict[str, Claim] = field(default_factory=dict)
    """Name of a job → what its worker has won last (`turn`)."""
    _claims: int = 0

    def actor(self, owner: str, project: str = "lab") -> Actor:
        with self.database.write() as session:
            for table, prefix, name in ((User, "user", owner), (Project, "proj", project)):
                if session.get(table, f"{prefix}-{name}") is None:
                    session.execute(insert(table).values(id=f"{prefix}-{name}", name=name))
        return Actor(f"user-{owner}", f"proj-{project}")

    def job(
        self,
        name: str,
        owner: str = "ada",
        project: str = "lab",
        *,
        priority: int = 0,
        prepared: bool = True,
        age: float | None = None,
        limit: int | None = None,
        **resources: Any,
    ) -> str:
        """A waiting job; one named later is younger, unless `age` (seconds) says otherwise."""
        actor = self.actor(owner, project)
        document = {
            "model": "team/tiny",
            "data": "file-0123456789abcdefghjkmnpqrs",
            "priority": priority,
            "resources": {"type": "single", "max_runtime_seconds": limit, **resources},
        }
        with self.database.write() as session:
            row = submit(session, actor, resolve(JobSpec.model_validate(document)))
            self.ids[name] = row.id
            if prepared:
                row.prepared = {"model_dir": "/models/tiny"}
            if age is not None:
                row.created_at = session.execute(select(db_now())).scalar_one() - age
        return self.ids[name]

    def box(self, name: str, slots: Sequence[Mapping[str, Any]], labels: Sequence[str] = ()) -> None:
        with self.database.write() as session:
            nodes.register(session, name, f"worker-of-{name}", "0.1.0", [dict(slot) for slot in slots], [], labels)

    def used(self, owner: str, seconds: float, project: str = "lab", *, days_ago: float = 0.0) -> None:
        """Charged to the owner already."""
        actor = self.actor(owner, project)
        with self.database.write() as session:
            now = session.execute(select(db_now())).scalar_one()
            session.execute(
                insert(UsageTotal).values(
                    owner_id=actor.user_id, project_id=actor.project_id, billed=seconds, at=now - 86_400 * days_ago
                )
            )

    def limit(self, scope: str, name: str, **values: Any) -> None:
        subject = self.actor(name).user_id if scope == "owner" else self.actor("ada", name).project_id
        with self.database.write() as session:
            session.execute(insert(Limit).values(scope=scope, subject_id=subject, **values))

    def claim(self, slot: Slot | None = None, node: str = "elsewhere") -> Claim | None:
        """By a slot of its own kind that nobody else has; of a node that nobody has described, unless one is named."""
        self._claims += 1
        slot = slot or Slot(f"GPU-x{self._claims}", "gpu", "amd", "gfx942", 192 << 30)
        with self.database.write() as session:
            return claims.claim(session, f"worker-of-{node}", node, slot, 600)

    def turn(self, node: str) -> Claim | None:
        """As the node's worker claims: for each of its free slots, with the others beside it."""
        with self.database.read() as session:
            seats = cluster.slot_states(session, self.database.now(), QUEUE_SETTINGS.silent_after)
        free = [seat.slot for seat in seats if seat.node == node and seat.free and seat.slot.phase == "train"]
        for slot in free:
            with self.database.write() as session:
                claim = claims.claim(
                    session,
                    f"worker-of-{node}",
                    node,
                    slot,
                    600,
                    beside=free,
                    leave_seconds=QUEUE_SETTINGS.leave_seconds,
                )
            if claim is not None:
                self.held[self.name(claim.token.job_id)] = claim
                return claim
        return None

    def tell(self, name: str, seconds_left: float | None, *, trained: float = 0.0) -> None:
        """Its trainer has told its pace; it has done steps for `trained` seconds."""
        with self.database.write() as session:
            now = session.execute(select(db_now())).scalar_one()
            progress = None if seconds_left is None else {"seconds_left": seconds_left}
            values = {"status": "running", "progress": progress, "progress_at": now}
            session.execute(update(Job).where(Job.id == self.ids[name]).values(**values))
            mine = update(Attempt).where(Attempt.job_id == self.ids[name], Attempt.ended_at.is_(None))
            session.execute(mine.values(training_at=now - trained))

    def wait(self, seconds: float) -> None:
        """So much time passes: everything that the database knows is so much older."""
        with self.database.write() as session:
            for column in CLOCKS:
                session.execute(update(column.class_).values({column: column - seconds}))

    def end(self, claim: Claim, after: float = SLICE_SECONDS) -> None:
        """It has run for `after` seconds and succeeds."""
        with self.database.write() as session:
            session.execute(
                update(Allocation)
                .where(Allocation.job_id == claim.token.job_id)
                .values(created_at=Allocation.created_at - after)
            )
            finish(session, claim.token, claim.kind, Succeeded({"ok": True}), 0, RetryPolicy())

    def name(self, job_id: str) -> str:
        (name,) = [name for name, known in self.ids.items() if known == job_id]
        return name

    def order_by_claims(self, slot: Slot | None = None) -> list[str]:
        """Claim until nothing is left; nothing ends meanwhile."""
        won = []
        while (claim := self.claim(slot and Slot(f"{slot.id}-{len(won)}", slot.kind, *_facts(slot)))) is not None:
            won.append(self.name(claim.token.job_id))
        return won

    def explained(self, limit: int = 100) -> list[explain.Explanation]:
        with self.database.read() as session:
            return explain.queue(session, QUEUE_SETTINGS, limit)

    def order_by_explanation(self) -> list[str]:
        told = [one for one in self.explained() if one.position is not None and one.phase == "train"]
        return [self.name(one.job.id) for one in sorted(told, key=lambda one: one.position or 0)]

    def why(self, name: str, settings: explain.QueueSettings = QUEUE_SETTINGS) -> explain.Explanation:
        with self.database.read() as session:
            row = session.get_one(Job, self.ids[name])
            told = explain.job(session, settings, row)
        assert told is not None
        return told


def _facts(slot: Slot) -> tuple[str, str, int, frozenset[str]]:
    return slot.vendor, slot.arch, slot.memory_bytes, slot.labels
