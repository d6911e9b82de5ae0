"""The model registry: a row for every model that a job has handed back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class RegisteredModel(Owned, Base):
    """What is known of a model beside the job that made it and that job's artifacts."""

    __tablename__ = "models"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    """The id of its job, with `model` in place of `job`."""
    name: Mapped[str | None] = mapped_column(String(100))
    """The job's; several models of one name are versions of it."""
    kind: Mapped[str] = mapped_column(String(16))
    """adapter, or model: all weights."""
    job_id: Mapped[str] = mapped_column(Id, index=True)
    tags: Mapped[list[Any]]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    __table_args__ = (Index(None, "project_id", "id"),)
