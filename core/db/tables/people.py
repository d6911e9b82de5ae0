"""Users, projects, memberships, keys, and the audit of what they have changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned


class User(Base):
    __tablename__ = "users"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    box_admin: Mapped[bool] = mapped_column(Boolean, insert_default=False)
    """Looks after the installation: nodes, users, projects. Says nothing about any project's jobs and files."""
    disabled_at: Mapped[float | None] = mapped_column(Float)
    """No key of theirs works from then on. Users are never deleted: rows name them."""


class Project(Base):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    spec_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0, server_default="0")
    """Bytes of the specs of its jobs and previews (core/jobs/policies/volume.py)."""


class Membership(Base):
    """What a user may do in a project. No row: the project does not exist for them."""

    __tablename__ = "memberships"
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    """viewer, member or admin (api/auth/policy.py)."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    __table_args__ = (Index(None, "project_id"),)


class ApiKey(Owned, Base):
    """A key is shown once; its SHA-256 stays, found by the prefix. It acts for one user in one project."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    prefix: Mapped[str] = mapped_column(String(16), unique=True)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    revoked_at: Mapped[float | None] = mapped_column(Float)
    scope: Mapped[str] = mapped_column(String(8))
    """The most it may be used for, whatever its user may: read, write, admin or box (api/auth/policy.py)."""
    expires_at: Mapped[float | None] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    """To about a minute (api/auth/last_use.py)."""
    rotated_from: Mapped[str | None] = mapped_column(Id)
    """The key that this one succeeds."""
    created_by: Mapped[str | None] = mapped_column(Id)
    """The user who made it; null: made on the box itself."""
    made_with: Mapped[str | None] = mapped_column(Id)
    """The key that it was made with, or rotated with; null: made on the box itself, or by an earlier version."""
    rights: Mapped[list[Any] | None]
    """What it may do with keys (api/auth/policy.py, Right); null: made by an earlier version, and has all."""
    session_until: Mapped[float | None] = mapped_column(Float)
    """Latest end of a browser's session, Unix seconds; `expires_at` comes before it when the session is idle. Null: an
    API key."""
    __table_args__ = (Index(None, "project_id", "owner_id"), Index(None, "made_with"), Index(None, "rotated_from"))


class IdempotencyKey(Owned, Base):
    """The answer once given for a key, so that a retried POST makes no second job."""

    __tablename__ = "idempotency_keys"
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[int] = mapped_column(Integer)
    body: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class Audit(Base):
    """A change that somebody made, written in the transaction of the change (core/jobs/policies/audit.py). Never a
    secret."""

    __tablename__ = "audit"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    time: Mapped[float] = mapped_column(Float, insert_default=db_now())
    action: Mapped[str] = mapped_column(String(64))
    """E.g. `node.drain`."""
    target: Mapped[str] = mapped_column(String(255))
    """Id or name of what was changed."""
    actor_id: Mapped[str | None] = mapped_column(Id, ForeignKey("users.id"))
    """The user; null: a command on the box itself."""
    key_id: Mapped[str | None] = mapped_column(Id)
    """The key they used."""
    project_id: Mapped[str | None] = mapped_column(Id, ForeignKey("projects.id"))
    """The project whose admins may read the entry; null: only admins of the box."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    data: Mapped[dict[str, Any]]
    __table_args__ = (
        Index(None, "target", "id"),
        Index(None, "project_id", "id"),
        Index(None, "actor_id", "id"),
    )
