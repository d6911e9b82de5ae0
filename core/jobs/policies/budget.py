"""What the data root may take: budgets in all and by kind, what is used of them, and what goes first for their sake.

Sizes are measured by the leading housekeeper (worker/upkeep/disk_usage.py) and kept in the database, so that every API
process and every worker goes by the same figures. Uploads are counted by their rows, to the byte and at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from core.db.tables import DiskUsage, File
from core.settings import Settings

Kind = Literal["uploads", "checkpoints", "runs", "models", "cache", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What the data root holds. Runs are without their checkpoints; other: logs, the embedded database and broker."""
Budgeted = Literal["total", "uploads", "checkpoints", "runs"]
SETTING: dict[Budgeted, str] = {
    "total": "EFT_DISK_BUDGET_BYTES",
    "uploads": "EFT_DISK_BUDGET_UPLOADS_BYTES",
    "checkpoints": "EFT_DISK_BUDGET_CHECKPOINTS_BYTES",
    "runs": "EFT_DISK_BUDGET_RUNS_BYTES",
}


@dataclass(frozen=True, slots=True)
class Over:
    """A budget that is used up."""

    kind: Budgeted
    used: int
    limit: int

    def words(self) -> str:
        what = "all of it takes" if self.kind == "total" else f"{self.kind} take"
        return f"{what} {_gb(self.used)} of a budget of {_gb(self.limit)} ({SETTING[self.kind]})"


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes; no entry: no budget."""

    limits: Mapping[Budgeted, int]

    @classmethod
    def of(cls, settings: Settings) -> Budget:
        found: dict[Budgeted, int] = {
            "total": settings.disk_budget_bytes,
            "uploads": settings.disk_budget_uploads_bytes,
            "checkpoints": settings.disk_budget_checkpoints_bytes,
            "runs": settings.disk_budget_runs_bytes,
        }
        return cls({kind: limit for kind, limit in found.items() if limit})

    def over(self, used: Mapping[Kind, int]) -> tuple[Over, ...]:
        """What is beyond its limit, the furthest first."""
        found = [Over(kind, _used(used, kind), limit) for kind, limit in self.limits.items()]
        return tuple(sorted((one for one in found if one.used > one.limit), key=lambda one: one.limit - one.used))

    def left(self, used: Mapping[Kind, int]) -> int | None:
        """Bytes that jobs may still take, below 0 where they have taken too much; None: there is no budget."""
        return min((limit - _used(used, kind) for kind, limit in self.limits.items()), default=None)


NO_BUDGET = Budget({})


@dataclass(frozen=True, slots=True)
class Headroom:
    """What jobs may take of the data root: of the disk less the reserve, and of the budgets."""

    free: int
    """Bytes of the disk."""
    reserve: int
    budget: int | None = None
    """Bytes left of the budgets."""
    over: tuple[Over, ...] = ()

    @property
    def left(self) -> int:
        """Below 0 nothing is started."""
        disk = self.free - self.reserve
        return disk if self.budget is None else min(disk, self.budget)


def _used(used: Mapping[Kind, int], kind: Budgeted) -> int:
    return sum(used.values()) if kind == "total" else used.get(kind, 0)


def measured(session: Session) -> dict[Kind, int]:
    """As last reported; uploads as of now."""
    found: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for kind, size in session.execute(select(DiskUsage.kind, DiskUsage.bytes)):
        if kind in found:
            found[kind] = size
    found["uploads"] = int(session.execute(select(func.coalesce(func.sum(File.bytes), 0))).scalar_one())
    return found


def tell(session: Session, used: Mapping[Kind, int]) -> None:
    session.execute(delete(DiskUsage))
    session.execute(insert(DiskUsage), [{"kind": kind, "bytes": size} for kind, size in sorted(used.items())])


def room(session: Session, budget: Budget, free: int, reserve: int) -> Headroom:
    """As it stands; nothing is asked of the database where there is no budget."""
    if not budget.limits:
        return Headroom(free, reserve)
    used = measured(session)
    return Headroom(free, reserve, budget.left(used), budget.over(used))


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
