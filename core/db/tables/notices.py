"""Webhooks and what is sent to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class Webhook(Owned, Base):
    """Target of a project's notifications about its jobs (core/jobs/base/deliveries.py, api/notices)."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    kind: Mapped[str] = mapped_column(String(16))
    """standard: signed JSON; chat: one line for Slack, Mattermost or Discord."""
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[Any]]
    """Kinds of notices, e.g. `job.failed`."""
    all_jobs: Mapped[bool] = mapped_column(Boolean, insert_default=True)
    """False: only of jobs that name it in `notify`."""
    secrets: Mapped[list[Any]]
    """Newest first: [{"secret": "whsec_…", "until": null or a time}]. Readable, since they sign."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    failing_since: Mapped[float | None] = mapped_column(Float)
    """When the first of the failures came that no success has followed."""
    disabled_at: Mapped[float | None] = mapped_column(Float)
    disabled_reason: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (Index(None, "project_id", "id"),)


class Delivery(Owned, Base):
    """One notice for one webhook, written in the transaction of the change that it tells of."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    """The `webhook-id` of every attempt."""
    webhook_id: Mapped[str] = mapped_column(Id, ForeignKey("webhooks.id"))
    job_id: Mapped[str | None] = mapped_column(Id)
    type: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    state: Mapped[str] = mapped_column(String(16), insert_default="pending")
    """pending, delivered or dead."""
    attempts: Mapped[int] = mapped_column(Integer, insert_default=0)
    next_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    last_at: Mapped[float | None] = mapped_column(Float)
    last_status: Mapped[int | None] = mapped_column(Integer)
    last_error: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (
        Index(None, "webhook_id", "id"),
        Index(
            "ix_webhook_deliveries_due",
            "webhook_id",
            "next_at",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
    )
