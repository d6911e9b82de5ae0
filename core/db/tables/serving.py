"""Models that are served, requests to them, and their answers as they come."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class ServingRow(Owned, Base):
    """What a serving has beside its job (`jobs.kind` serving), whose id it shares. It serves one base of a project."""

    __tablename__ = "servings"
    id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    base: Mapped[str] = mapped_column(String(64))
    """Hash of what makes the base: requests to one base go to one serving."""
    used_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    """When a request came or was answered last."""
    __table_args__ = (Index("ix_servings_base", "project_id", "base"),)


class CompletionRow(Owned, Base):
    """A request that waits or is being answered. It goes with the answer: nothing of it is kept."""

    __tablename__ = "completions"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    serving_id: Mapped[str] = mapped_column(Id, ForeignKey("servings.id"))
    request: Mapped[dict[str, Any]]
    """core/spec/serving/request.py."""
    streamed: Mapped[bool]
    """Pieces were told as they came, so that it cannot be answered anew."""
    attempt: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Attempt of the serving that answers it; 0: none yet."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    seen_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    """When the caller was there last: without one it is dropped."""
    __table_args__ = (Index("ix_completions_serving_id", "serving_id"),)


class CompletionPiece(Base):
    """Pieces of an answer that came together, or its end."""

    __tablename__ = "completion_pieces"
    completion_id: Mapped[str] = mapped_column(Id, ForeignKey("completions.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    content: Mapped[list[Any]]
    """Frames of the child without their id: pieces, done or error."""
