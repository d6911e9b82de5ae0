"""The installation itself."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id


class Installation(Base):
    """The one row that says which installation this database is that of (core/jobs/installation.py)."""

    __tablename__ = "installation"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    mark: Mapped[str | None] = mapped_column(String(64))
    """Token that the data root has in its installation.json; null until a process has put it there."""
    marked_at: Mapped[float | None] = mapped_column(Float)
    marked_by: Mapped[str | None] = mapped_column(Text)
    """The process that made the mark and where it saw the data root, in words."""
    version: Mapped[str | None] = mapped_column(String(32))
    """Version of the API that was started last."""
    words: Mapped[list[Any] | None]
    """What the jobs say that it writes (core/spec/vocabulary.py)."""
    words_sha256: Mapped[str | None] = mapped_column(String(64))


class SchemaFloor(Base):
    """One row: which versions may use the database (core/db/migrate.py)."""

    __tablename__ = "schema_floor"
    id: Mapped[str] = mapped_column(String(8), primary_key=True, insert_default="floor")
    works_from: Mapped[str] = mapped_column(String(32))
    """The oldest revision whose code may."""


class Leader(Base):
    """Leases of the one process that does the housekeeping, and of the one that sends notices."""

    __tablename__ = "leaders"
    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(Id)
    until: Mapped[float] = mapped_column(Float)
