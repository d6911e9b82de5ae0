"""What everybody has used, and how much they may."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class UsageTotal(Owned, Base):
    """What an owner has used in a project, as far as it is charged (core/jobs/policies/usage.py)."""

    __tablename__ = "usage"
    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    billed: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """Billed seconds, each counted by its age at `at` (core/jobs/base/shares.py)."""
    at: Mapped[float] = mapped_column(Float, insert_default=0.0)
    disk_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Files and run folders, as measured last."""
    disk_at: Mapped[float | None] = mapped_column(Float)


class UsageDay(Owned, Base):
    """Time charged, by the day (UTC) in which it was used: for the report and for quotas of a week."""

    __tablename__ = "usage_days"
    day: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Days since 1970-01-01."""
    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    gpu_seconds: Mapped[float] = mapped_column(Float, insert_default=0.0)
    cpu_seconds: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """Seconds of training on CPU slots."""


class Limit(Base):
    """Shares and quotas of a project or an owner. Null: no quota."""

    __tablename__ = "limits"
    scope: Mapped[Literal["project", "owner"]] = mapped_column(String(8), primary_key=True)
    subject_id: Mapped[str] = mapped_column(Id, primary_key=True)
    shares: Mapped[float | None] = mapped_column(Float)
    """Shares of an owner; null: 1."""
    max_priority: Mapped[int | None] = mapped_column(Integer)
    """Highest priority of a project's jobs; null: core.jobs.policies.quotas.MAX_PRIORITY."""
    max_running: Mapped[int | None] = mapped_column(Integer)
    max_queued: Mapped[int | None] = mapped_column(Integer)
    max_previews: Mapped[int | None] = mapped_column(Integer)
    """Previews that wait or run at once; beyond it they are refused. Null, of a project: EFT_MAX_PREVIEWS."""
    max_sessions: Mapped[int | None] = mapped_column(Integer)
    """Open sessions, parked ones too. Null, of an owner: EFT_MAX_SESSIONS."""
    max_adapters: Mapped[int | None] = mapped_column(Integer)
    """Adapters in open sessions."""
    session_hours_week: Mapped[float | None] = mapped_column(Float)
    """Hours for which sessions hold slots."""
    session_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Tensors of operations and results of sessions, as long as they are kept."""
    gpu_hours_week: Mapped[float | None] = mapped_column(Float)
    disk_bytes: Mapped[int | None] = mapped_column(BigInteger)
    preemptible: Mapped[bool | None] = mapped_column(Boolean)
    """Whether running jobs of a project may be paused for waiting ones of a higher priority; null: no."""


class DiskUsage(Base):
    """What the data root holds, by kind, as the leading housekeeper has measured it last
    (core/jobs/policies/budget.py)."""

    __tablename__ = "disk_usage"
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float, insert_default=db_now())
