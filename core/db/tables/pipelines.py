"""Pipelines: jobs one after another, each of which starts from the model of the one before."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class Pipeline(Owned, Base):
    """Steps and what becomes of them (core/jobs/lifecycle/pipelines)."""

    __tablename__ = "pipelines"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str | None] = mapped_column(String(100))
    status: Mapped[str] = mapped_column(String(16), insert_default="running")
    """running, succeeded, failed or cancelled."""
    reason: Mapped[str] = mapped_column(Text, insert_default="")
    """Why it is where it is, for people."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    retry_of: Mapped[str | None] = mapped_column(Id, ForeignKey("pipelines.id"), index=True)
    notify: Mapped[list[Any]]
    """Ids of webhooks that receive its events, beside those that receive all."""
    event_seq: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Number of the newest event; counted under this row's lock."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    finished_at: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (
        Index(None, "project_id", "id"),
        Index(
            "ix_pipelines_running",
            "id",
            sqlite_where=text("status = 'running'"),
            postgresql_where=text("status = 'running'"),
        ),
    )


class PipelineStep(Owned, Base):
    """One job of a pipeline, before it is submitted and after."""

    __tablename__ = "pipeline_steps"
    pipeline_id: Mapped[str] = mapped_column(Id, ForeignKey("pipelines.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Counts from 0."""
    name: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]]
    """The job as it was checked; ids of jobs that are not there yet stand for steps (core/jobs/lifecycle/pipelines)."""
    gates: Mapped[list[Any]]
    """What the job's figures must be before the next step: [{"metric", "min", "max"}]."""
    job_id: Mapped[str | None] = mapped_column(Id, index=True)
    """Its job, written in the transaction that submits it."""
    retries: Mapped[str | None] = mapped_column(Id)
    """Job from whose checkpoints it goes on, where a failed step is tried again."""
    passed: Mapped[list[Any] | None]
    """The gates with the figures that they were held against: [{"metric", "min", "max", "value", "passed"}]."""


class PipelineEvent(Owned, Base):
    """What happened to a pipeline. Its jobs have events of their own."""

    __tablename__ = "pipeline_events"
    pipeline_id: Mapped[str] = mapped_column(Id, ForeignKey("pipelines.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    type: Mapped[str] = mapped_column(String(32))
    """status or step."""
    time: Mapped[float] = mapped_column(Float, insert_default=db_now())
    data: Mapped[dict[str, Any]]
