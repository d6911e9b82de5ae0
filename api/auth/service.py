"""API keys: `eft_<prefix>_<secret><checksum>`. The database has a key's prefix, to find it, and its SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, bindparam, select
from sqlalchemy.orm import Session

from api.auth import families
from api.auth.policy import Principal, Right, Role, Scope
from core.db.engine import db_now
from core.db.tables import ApiKey, Membership, Project, User
from core.errors import Unauthorized
from core.ids import new_id

PATTERN = r"eft_[0-9a-z]{8}_[0-9A-Za-z]{46}"
"""Every key that is made now; for those who search code and logs for secrets (docs/security.md)."""
_FORM = re.compile(r"eft_([0-9a-z]{8})_[0-9A-Za-z]{40}(?:[0-9A-Za-z]{6})?")
"""Those of earlier versions have no checksum."""
_CHECKSUM = 6
_PLAIN = 4 + 8 + 1 + 40
"""Characters of a key without its checksum."""
_NOBODYS = "0" * 64
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_DIGITS = _LETTERS[:10] + _LETTERS[10:].upper() + _LETTERS[10:]

_HOLDERS = (
    select(
        ApiKey.id,
        ApiKey.sha256,
        ApiKey.owner_id,
        ApiKey.project_id,
        ApiKey.scope,
        ApiKey.rights,
        ApiKey.expires_at,
        ApiKey.session_until,
        (ApiKey.expires_at <= db_now()).label("expired"),
        User.name.label("user_name"),
        User.box_admin,
        Project.name.label("project_name"),
        Membership.role,
    )
    .join(User, User.id == ApiKey.owner_id)
    .join(Project, Project.id == ApiKey.project_id)
    .outerjoin(Membership, (Membership.user_id == ApiKey.owner_id) & (Membership.project_id == ApiKey.project_id))
    .where(ApiKey.revoked_at.is_(None), User.disabled_at.is_(None))
)
"""Keys that were not revoked, of users who were not disabled."""
# Every request asks one of them: put together once, since that costs as much as asking.
_BY_PREFIX = _HOLDERS.where(ApiKey.prefix == bindparam("prefix"))
_BY_ID = _HOLDERS.where(ApiKey.id == bindparam("id"))


def authenticate(session: Session, key: str, request_id: str | None = None) -> Principal | None:
    """Look up the user and role behind `key`; None for an unknown, revoked or malformed one, or a disabled user's.

    Raises Unauthorized for one that has expired: whoever has all of it may know that; Reused where it has a successor.
    """
    form = _FORM.fullmatch(key)
    if form is None or (len(key) > _PLAIN and checksum(key[:_PLAIN]) != key[_PLAIN:]):
        return None
    row = session.execute(_BY_PREFIX, {"prefix": form[1]}).one_or_none()
    # A key has 238 random bits, so a plain hash is enough: there is nothing to guess slowly. It is compared where
    # nobody has the prefix, too, so that both take as long.
    right = hmac.compare_digest(_NOBODYS if row is None else row.sha256, _hash(key))
    if row is None or not right:
        return None
    if row.expired:
        if families.has_successor(session, row.id):
            raise families.Reused(row.id)
        when = datetime.fromtimestamp(row.expires_at, UTC).strftime("%Y-%m-%d %H:%M")
        raise Unauthorized(
            f"this API key expired on {when} UTC; an admin of the project makes a new one, "
            "and so does another key of yours (`eft keys create`)",
            code="expired_api_key",
        )
    return _principal(row, request_id)


def again(session: Session, principal: Principal) -> Principal | None:
    """Somebody who was let in before, as they are now; None when their key no longer works."""
    row = session.execute(_BY_ID, {"id": principal.key_id}).one_or_none()
    return None if row is None or row.expired else _principal(row, principal.request_id)


def _principal(row: Row[*tuple[Any, ...]], request_id: str | None) -> Principal:
    return Principal(
        user_id=row.owner_id,
        project_id=row.project_id,
        request_id=request_id,
        key_id=row.id,
        user_name=row.user_name,
        project_name=row.project_name,
        role=None if row.role is None else Role(row.role),
        scope=Scope(row.scope),
        box_admin=row.box_admin,
        expires_at=row.expires_at,
        rights=rights_of(row.rights),
        session=row.session_until is not None,
    )


def rights_of(stored: Iterable[str] | None) -> frozenset[Right]:
    """From the column of a key; those of earlier versions have all."""
    return frozenset(Right) if stored is None else frozenset(Right(one) for one in stored)


def checksum(plain: str) -> str:
    """The last six characters of a key: CRC-32 of those before in base 62. It says that a text is a key of eft, so that
    a search for leaked secrets raises no false alarm; it protects nothing."""
    value, digits = zlib.crc32(plain.encode()), ""
    for _ in range(_CHECKSUM):
        value, digit = divmod(value, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits


def create(
    session: Session,
    *,
    user_id: str,
    project_id: str,
    name: str,
    scope: Scope,
    expires_at: float | None = None,
    created_by: str | None = None,
    made_with: str | None = None,
    rotated_from: str | None = None,
    rights: Iterable[Right] = tuple(Right),
    session_until: float | None = None,
) -> tuple[str, ApiKey]:
    """Make a key. The text is the only time it can be read."""
    prefix = "".join(secrets.choice(_LETTERS) for _ in range(8))
    secret = "".join(secrets.choice(_LETTERS + _LETTERS[10:].upper()) for _ in range(40))
    key = f"eft_{prefix}_{secret}"
    key += checksum(key)
    row = ApiKey(
        id=new_id("key"),
        owner_id=user_id,
        project_id=project_id,
        name=name,
        prefix=prefix,
        sha256=_hash(key),
        scope=scope.value,
        expires_at=expires_at,
        created_by=created_by,
        made_with=made_with,
        rights=sorted(right.value for right in rights),
        rotated_from=rotated_from,
        session_until=session_until,
    )
    session.add(row)
    session.flush()
    return key, row


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


def by_prefix(session: Session, prefix: str) -> str | None:
    """The id of the key with this prefix that has not been revoked, locked."""
    query = select(ApiKey.id).where(ApiKey.prefix == prefix, ApiKey.revoked_at.is_(None))
    return session.execute(query.with_for_update()).scalar_one_or_none()


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
