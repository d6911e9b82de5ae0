"""Sweeps: one job with other values in some of its fields, run by run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class SweepRow(Owned, Base):
    """A sweep; its runs are jobs that name it (core/jobs/lifecycle/sweeps)."""

    __tablename__ = "sweeps"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str | None] = mapped_column(String(100))
    status: Mapped[str] = mapped_column(String(16), insert_default="running")
    """running, succeeded, failed or cancelled."""
    reason: Mapped[str] = mapped_column(Text, insert_default="")
    spec: Mapped[dict[str, Any]]
    """core/spec/sweep.py, with the metric written out."""
    rungs: Mapped[list[Any]]
    """Comparisons that have been made: [{"step", "values": {job: value}, "stopped": [job]}]."""
    waiting: Mapped[list[Any]]
    """Jobs that were paused until the others have come to the next comparison."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    finished_at: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (
        Index(None, "project_id", "id"),
        Index(
            "ix_sweeps_running",
            "id",
            sqlite_where=text("status = 'running'"),
            postgresql_where=text("status = 'running'"),
        ),
    )
