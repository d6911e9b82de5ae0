"""Nodes, their slots, and the jobs or people that hold them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class Node(Base):
    """A box and the worker that serves it now."""

    __tablename__ = "nodes"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    worker: Mapped[str] = mapped_column(Id)
    version: Mapped[str] = mapped_column(String(32))
    slots: Mapped[list[Any]]
    notes: Mapped[list[Any]]
    labels: Mapped[list[Any]] = mapped_column(insert_default=list)
    """EFT_NODE_LABELS of its worker."""
    started_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    heartbeat_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    drained_at: Mapped[float | None] = mapped_column(Float)
    """Nothing is claimed on it from then on, until it is null again; whatever worker serves it."""
    drained_by: Mapped[str | None] = mapped_column(Id)
    drain_reason: Mapped[str | None] = mapped_column(Text)


class Allocation(Owned, Base):
    """A slot held by an attempt; a job of k GPUs has k rows. The partial unique index is the mutex: no slot is ever
    held twice."""

    __tablename__ = "allocations"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    slot: Mapped[str] = mapped_column(String(128), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    released_at: Mapped[float | None] = mapped_column(Float)
    gpus: Mapped[int] = mapped_column(Integer, insert_default=0)
    """0 for a CPU slot, and for a slot that prepares or previews."""
    billing: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """What a second of it counts in fair share (Slurm: TRESBillingWeights)."""
    charged_at: Mapped[float | None] = mapped_column(Float)
    """When its time went into `usage`; null while it is held, and for seconds after."""
    __table_args__ = (
        Index(
            "uq_allocations_active",
            "node",
            "slot",
            unique=True,
            sqlite_where=text("released_at IS NULL"),
            postgresql_where=text("released_at IS NULL"),
        ),
        Index(
            "ix_allocations_uncharged",
            "job_id",
            "attempt",
            sqlite_where=text("charged_at IS NULL"),
            postgresql_where=text("charged_at IS NULL"),
        ),
        Index("ix_allocations_history", "node", "slot", "created_at"),
    )


class SlotGuest(Owned, Base):
    """A session in the process of another one, which has the slot: the two, and whoever else is there, are billed for
    equal parts of its time."""

    __tablename__ = "slot_guests"
    job_id: Mapped[str] = mapped_column(Id, primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    host_id: Mapped[str] = mapped_column(Id)
    host_attempt: Mapped[int] = mapped_column(Integer)
    began_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    ended_at: Mapped[float | None] = mapped_column(Float)
    """When it left, which may be a moment after the slot was free."""
    __table_args__ = (Index("ix_slot_guests_host", "host_id", "host_attempt"),)


class Hold(Base):
    """A slot that is not claimed: somebody works on it by hand, or it is drained."""

    __tablename__ = "holds"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    node: Mapped[str] = mapped_column(String(255))
    slot: Mapped[str] = mapped_column(String(128))
    kind: Mapped[str] = mapped_column(String(8))
    """hold or drain."""
    held_for: Mapped[str] = mapped_column(String(100))
    why: Mapped[str] = mapped_column(Text)
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    """The user who made the hold."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    until: Mapped[float | None] = mapped_column(Float)
    """Null: until it is released."""
    released_at: Mapped[float | None] = mapped_column(Float)
    """Also set for a hold that ran out, once a scan has found it."""
    __table_args__ = (
        Index(
            "uq_holds_active",
            "node",
            "slot",
            unique=True,
            sqlite_where=text("released_at IS NULL"),
            postgresql_where=text("released_at IS NULL"),
        ),
        Index("ix_holds_history", "node", "slot", "created_at"),
    )


class Maintenance(Base):
    """A time in which nothing runs on a node."""

    __tablename__ = "maintenance"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    node: Mapped[str | None] = mapped_column(String(255))
    """Null: all of them."""
    starts_at: Mapped[float] = mapped_column(Float)
    ends_at: Mapped[float] = mapped_column(Float)
    why: Mapped[str] = mapped_column(Text)
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    cancelled_at: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (Index(None, "ends_at"),)
