"""Sessions: training loops that run elsewhere, and the log of their operations."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned

UNDONE = "done_at IS NULL"
KEPT = "result_bytes > 0"


class SessionRow(Owned, Base):
    """What a session has beside its job (`jobs.kind` session), whose id it shares."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """core/spec/session/job.py."""
    positions: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Operations accepted so far; the next has the next number."""
    snapshot: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Position of the newest snapshot."""
    forgotten: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Position up to which the tensors of operations have been removed: they are never computed again."""
    log_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Bytes of the tensors of operations and results that are kept."""
    used_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    """When an operation was accepted or answered last; of a parked session also when its program was heard of."""


class SessionOperation(Owned, Base):
    """An operation that was accepted: it is computed exactly once, whatever is killed meanwhile."""

    __tablename__ = "session_operations"
    session_id: Mapped[str] = mapped_column(Id, ForeignKey("sessions.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Its place in the session's log, from 1: the order in which operations are computed."""
    model: Mapped[str] = mapped_column(String(64))
    """Name of the adapter; empty: the base."""
    seq: Mapped[int] = mapped_column(Integer)
    """The caller's number of it, with which it may be sent again."""
    operation: Mapped[dict[str, Any]]
    sha256: Mapped[str] = mapped_column(String(64))
    """SHA-256 of operation and tensors."""
    tensor_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    tensors: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    """Few bytes of tensors, which are not worth a file; null where there are none, they have one, or have gone."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    done_at: Mapped[float | None] = mapped_column(Float)
    result: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    result_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Size of the tensors of the result, bytes; 0 where it has none, or they have gone."""
    result_sha256: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of the tensors of the result, against which a replay is held."""
    __table_args__ = (
        UniqueConstraint("session_id", "model", "seq"),
        Index(
            "ix_session_operations_undone",
            "session_id",
            "position",
            sqlite_where=text(UNDONE),
            postgresql_where=text(UNDONE),
        ),
        Index("ix_session_operations_kept", "done_at", sqlite_where=text(KEPT), postgresql_where=text(KEPT)),
    )


class SessionSave(Owned, Base):
    """What an operation saved under a name of the caller's. The row comes with the operation, the folder with its
    end."""

    __tablename__ = "session_saves"
    session_id: Mapped[str] = mapped_column(Id, primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    folder: Mapped[str] = mapped_column(String(100))
    """Its name below the session's `saved`."""
    kind: Mapped[str] = mapped_column(String(16))
    """`weights`, `sampler_weights` or `external_weights`."""
    label: Mapped[str] = mapped_column(String(100))
    """The caller's name. The newest one of a kind counts."""
    about: Mapped[dict[str, Any]]
    """The caller's metadata."""
    expires_at: Mapped[float | None] = mapped_column(Float)
    """From then on it is gone; its files go when no session needs them to compute its log again."""
    published_at: Mapped[float | None] = mapped_column(Float)
    """Since when all projects may read it; null: its own alone."""
    recipients: Mapped[list[Any] | None]
    """Keys of age for which its files are encrypted before they are given away."""
    __table_args__ = (
        ForeignKeyConstraint(
            ["session_id", "position"], ["session_operations.session_id", "session_operations.position"]
        ),
        UniqueConstraint("session_id", "folder"),
        Index("ix_session_saves_project_id", "project_id", "session_id"),
    )
