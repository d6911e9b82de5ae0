"""Families of keys: what was made with a key, or rotated from it, ends with it. Inside the caller's transaction."""

from __future__ import annotations

from sqlalchemy import Select, or_, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import ApiKey, User
from core.errors import Unauthorized
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit


class Reused(Unauthorized):
    """A whole key that has a successor came after its end: it is in somebody's hands who should not have it, or in a
    place that was forgotten. Nobody can tell which, so the family ends."""

    code = "reused_api_key"

    def __init__(self, key_id: str) -> None:
        super().__init__(
            "this API key has a successor and its time is over: all keys of its family have been revoked, since it may "
            "have been stolen; make a new one (`eft keys create`), or ask an admin of the project"
        )
        self.key_id = key_id


def has_successor(session: Session, key_id: str) -> bool:
    return session.execute(select(ApiKey.id).where(ApiKey.rotated_from == key_id).limit(1)).first() is not None


def end(session: Session, actor: Actor | None, key_id: str, *, alone: bool = False) -> list[str]:
    """Revoke a key with all that was made with it or succeeded it; `alone`: that key and no other.

    Returns the ids of the others that worked until now, oldest first. What does not work any more stays as it is.
    """
    found = [key_id] if alone else _locked_descent(session, key_id)
    return _revoke(session, actor, "key.revoke", key_id, found)


def end_reused(session: Session, key_id: str) -> list[str]:
    """End the whole chain of rotations that a reused key is of, and all that was made with any key of it."""
    first = key_id
    while (before := session.execute(select(ApiKey.rotated_from).where(ApiKey.id == first)).scalar_one()) is not None:
        first = before
    return _revoke(session, None, "key.reuse", key_id, _locked_descent(session, first))


def _revoke(session: Session, actor: Actor | None, action: str, key_id: str, found: list[str]) -> list[str]:
    over = session.execute(
        update(ApiKey)
        .where(ApiKey.id.in_(found), ApiKey.revoked_at.is_(None))
        .values(revoked_at=db_now())
        .returning(ApiKey.id, ApiKey.project_id, ApiKey.expires_at, db_now().label("now"))
        .execution_options(synchronize_session=False)
    ).all()
    worked = [row for row in over if row.id != key_id and (row.expires_at is None or row.expires_at > row.now)]
    others = sorted(row.id for row in worked)
    if any(row.id == key_id for row in over) or others:
        query = select(ApiKey, User.name).join(User, User.id == ApiKey.owner_id).where(ApiKey.id == key_id)
        key, user = session.execute(query.execution_options(populate_existing=True)).one()
        told = {"name": key.name, "prefix": key.prefix, "user": user, "revoked_with_it": others}
        audit.record(session, actor, action, key_id, told, project_id=key.project_id)
    for row in sorted(worked, key=lambda row: row.id):
        audit.record(session, actor, "key.revoke", row.id, {"revoked_with": key_id}, project_id=row.project_id)
    return others


def _locked_descent(session: Session, key_id: str) -> list[str]:
    """The key and all below it, locked: making a key locks the key that it is made with (api/auth/keyring.py), so that
    none is added to what was found."""
    found: list[str] = []
    while True:
        again = list(session.execute(_descent(key_id)).scalars())
        if again == found:
            return found
        found = again
        session.execute(select(ApiKey.id).where(ApiKey.id.in_(found)).order_by(ApiKey.id).with_for_update()).all()


def _descent(key_id: str) -> Select[str]:
    top = select(ApiKey.id).where(ApiKey.id == key_id).cte("descent", recursive=True)
    below = select(ApiKey.id).join(top, or_(ApiKey.made_with == top.c.id, ApiKey.rotated_from == top.c.id))
    tree = top.union(below)
    return select(tree.c.id).order_by(tree.c.id)
