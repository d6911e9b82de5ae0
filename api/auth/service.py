"""API keys: `eft_<prefix>_<secret>`. The database has the prefix to find a key and its SHA-256 to check it."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import ApiKey, Project, User
from core.ids import new_id

_FORM = re.compile(r"eft_([0-9a-z]{8})_[0-9A-Za-z]{40}")
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose key it is."""

    user_id: str
    project_id: str


def authenticate(session: Session, key: str) -> Owner | None:
    """Who holds this key; None for an unknown, revoked or malformed one."""
    form = _FORM.fullmatch(key)
    if form is None:
        return None
    row = session.execute(
        select(ApiKey).where(ApiKey.prefix == form[1], ApiKey.revoked_at.is_(None))
    ).scalar_one_or_none()
    # A key has 238 random bits, so a plain hash is enough: there is nothing to guess slowly.
    if row is None or not hmac.compare_digest(row.sha256, _hash(key)):
        return None
    return Owner(row.owner_id, row.project_id)


def create(session: Session, *, project: str, user: str, name: str) -> str:
    """Make a key, and user and project where they are new. The answer is the only time it can be read."""
    prefix = "".join(secrets.choice(_LETTERS) for _ in range(8))
    secret = "".join(secrets.choice(_LETTERS + _LETTERS[10:].upper()) for _ in range(40))
    key = f"eft_{prefix}_{secret}"
    session.add(
        ApiKey(
            id=new_id("key"),
            owner_id=_named(session, User, "user", user),
            project_id=_named(session, Project, "proj", project),
            name=name,
            prefix=prefix,
            sha256=_hash(key),
        )
    )
    session.flush()
    return key


def any_key(session: Session) -> bool:
    return session.execute(select(ApiKey.id).limit(1)).one_or_none() is not None


def listing(session: Session) -> Sequence[tuple[ApiKey, str, str]]:
    """Keys with the names of their user and project, oldest first."""
    rows = session.execute(
        select(ApiKey, User.name, Project.name)
        .join(User, User.id == ApiKey.owner_id)
        .join(Project, Project.id == ApiKey.project_id)
        .order_by(ApiKey.created_at, ApiKey.id)
    )
    return [(key, user, project) for key, user, project in rows]


def revoke(session: Session, prefix: str) -> bool:
    """False when no working key has this prefix."""
    row = session.execute(
        update(ApiKey)
        .where(ApiKey.prefix == prefix, ApiKey.revoked_at.is_(None))
        .values(revoked_at=db_now())
        .returning(ApiKey.id)
    ).one_or_none()
    return row is not None


def _named(session: Session, table: type[User] | type[Project], prefix: str, name: str) -> str:
    known = session.execute(select(table.id).where(table.name == name)).scalar_one_or_none()
    if known is not None:
        return known
    row = table(id=new_id(prefix), name=name)
    session.add(row)
    session.flush()
    return row.id


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
