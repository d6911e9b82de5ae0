"""Keys over HTTP: whose one may list, make, rotate and revoke. Inside the caller's transaction; each change audited."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from api.auth import people, service
from api.auth.permit import forbidden
from api.auth.policy import Principal, Role, Scope, widest
from api.auth.schemas import KeyWish
from api.errors import BadRequest
from core.db.engine import db_now
from core.db.tables import ApiKey, Project, User
from core.errors import Conflict, NotFound
from core.jobs import audit
from core.jobs.queries import Page, UnknownCursor

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A key with whom it belongs to."""

    key: ApiKey
    user: User
    project: Project


def page(
    session: Session, asking: Principal, *, everybody: bool, project: str | None, after: str | None, limit: int
) -> Page[Shown]:
    """One's own keys of the key's project; of `everybody` in it, and of another project, for those who look after it.

    Raises Forbidden, NotFound, UnknownCursor.
    """
    where = _where(session, asking, project)
    query = _shown().where(ApiKey.project_id == where)
    if everybody or where != asking.project_id:
        _must_manage(session, asking)
    else:
        query = query.where(ApiKey.owner_id == asking.user_id)
    if after is not None:
        if session.execute(query.where(ApiKey.id == after)).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a key in this list", field="after")
        query = query.where(ApiKey.id < after)
    rows = session.execute(query.order_by(ApiKey.id.desc()).limit(limit + 1)).all()
    return Page([Shown(*row) for row in rows[:limit]], len(rows) > limit)


def find(session: Session, asking: Principal, key_id: str, *, lock: bool = False) -> Shown:
    """One's own, or one that one looks after. Raises NotFound for anybody else's as for none."""
    query = _shown().where(ApiKey.id == key_id)
    if not asking.operates:
        query = query.where(ApiKey.project_id == asking.project_id)
        if not asking.manages:
            query = query.where(ApiKey.owner_id == asking.user_id)
    row = session.execute(query.with_for_update(of=ApiKey) if lock else query).one_or_none()
    if row is None:
        raise NotFound(f"there is no key `{key_id[:60]}`; `GET /keys` lists yours", field="key_id")
    return Shown(*row)


def create(session: Session, asking: Principal, wish: KeyWish) -> tuple[str, Shown]:
    """It allows no more than the key it is made with, and lives no longer. Raises Forbidden, NotFound, BadRequest."""
    where = _where(session, asking, wish.project)
    whose = asking.user_id
    if wish.user is not None and wish.user not in (asking.user_id, asking.user_name):
        _must_manage(session, asking)
        whose = people.user(session, wish.user).id
    elif where != asking.project_id:
        _must_manage(session, asking)
    user = session.get_one(User, whose)
    role = people.role(session, whose, where)
    if role is None:
        raise BadRequest(f"`{user.name}` is not a member of this project; make them one first", field="user")
    most = widest(role, user.box_admin)
    scope = wish.scope
    if scope is None:
        scope = most if asking.scope.reaches(most) else asking.scope
    if not asking.scope.reaches(scope):
        raise forbidden(session, asking, Scope.BOX if scope is Scope.METRICS else scope)
    if not most.reaches(scope):
        boxes = scope in (Scope.BOX, Scope.METRICS)
        what = "no admin of the box" if boxes else f"`{role.value}` in this project"
        raise BadRequest(
            f"`{user.name}` is {what}: a key of scope `{scope.value}` would be of no use to them", field="scope"
        )
    expires_at = asking.expires_at
    if wish.expires_in_days is not None:
        expires_at = _now(session) + wish.expires_in_days * DAY
        if asking.expires_at is not None and expires_at > asking.expires_at:
            raise BadRequest(
                "a key cannot live longer than the one it is made with; leave `expires_in_days` out for as long",
                field="expires_in_days",
            )
    key, row = service.create(
        session,
        user_id=whose,
        project_id=where,
        name=wish.name,
        scope=scope,
        expires_at=expires_at,
        created_by=asking.user_id,
    )
    told = {
        "name": row.name,
        "prefix": row.prefix,
        "user": user.name,
        "scope": scope.value,
        "expires_at": expires_at,
    }
    audit.record(session, asking, "key.create", row.id, told, project_id=where)
    return key, find(session, asking, row.id)


def rotate(session: Session, asking: Principal, key_id: str, overlap_seconds: float) -> tuple[str, Shown]:
    """A successor with the same name, scope and span of life; the old key works for `overlap_seconds` more.

    Raises NotFound, Forbidden, BadRequest, and Conflict for a key that does not work or has its successor already.
    """
    old = find(session, asking, key_id, lock=True)
    if not asking.scope.reaches(Scope(old.key.scope)):
        raise forbidden(session, asking, Scope(old.key.scope))
    if asking.expires_at is not None and key_id != asking.key_id:
        raise BadRequest(
            "a key that expires rotates only itself: the successor of another might outlive it", field="key_id"
        )
    now = _now(session)
    if old.key.revoked_at is not None or (old.key.expires_at is not None and old.key.expires_at <= now):
        raise Conflict("this key does not work any more; make a new one", code="key_is_over", field="key_id")
    successor = select(ApiKey.id).where(ApiKey.rotated_from == key_id, ApiKey.revoked_at.is_(None))
    if session.execute(successor.limit(1)).one_or_none() is not None:
        raise Conflict(
            "this key has been rotated already; revoke its successor first if nobody has it",
            code="already_rotated",
            field="key_id",
        )
    span = None if old.key.expires_at is None else old.key.expires_at - old.key.created_at
    ends = now + overlap_seconds if old.key.expires_at is None else min(now + overlap_seconds, old.key.expires_at)
    key, row = service.create(
        session,
        user_id=old.key.owner_id,
        project_id=old.key.project_id,
        name=old.key.name,
        scope=Scope(old.key.scope),
        expires_at=None if span is None else now + span,
        created_by=asking.user_id,
        rotated_from=key_id,
    )
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(expires_at=ends))
    told = {"successor": row.id, "prefix": row.prefix, "old_key_ends_at": ends, "expires_at": row.expires_at}
    audit.record(session, asking, "key.rotate", key_id, told, project_id=old.key.project_id)
    return key, find(session, asking, row.id)


def revoke(session: Session, asking: Principal, key_id: str) -> Shown:
    """It stops working at once; asking twice is fine. Raises NotFound; and Forbidden where one's own key of a smaller
    scope would revoke one of a larger."""
    found = find(session, asking, key_id, lock=True)
    mine = found.key.owner_id == asking.user_id
    if mine and not (asking.manages or asking.operates) and not asking.scope.reaches(Scope(found.key.scope)):
        raise forbidden(session, asking, Scope(found.key.scope))
    if found.key.revoked_at is None:
        session.execute(update(ApiKey).where(ApiKey.id == key_id).values(revoked_at=db_now()))
        told = {"name": found.key.name, "prefix": found.key.prefix, "user": found.user.name}
        audit.record(session, asking, "key.revoke", key_id, told, project_id=found.key.project_id)
        session.refresh(found.key)
    return found


def _shown() -> Select[ApiKey, User, Project]:
    return (
        select(ApiKey, User, Project)
        .join(User, User.id == ApiKey.owner_id)
        .join(Project, Project.id == ApiKey.project_id)
        .execution_options(populate_existing=True)
    )


def _where(session: Session, asking: Principal, project: str | None) -> str:
    """The project that is meant. Raises NotFound for another one, as for none, to all but admins of the box."""
    if project is None or project in (asking.project_id, asking.project_name):
        return asking.project_id
    if not asking.operates:
        raise NotFound(people.no_project(project), field="project")
    return people.project(session, project).id


def _must_manage(session: Session, asking: Principal) -> None:
    """Keys of others are for admins of the project, and of the box."""
    if asking.manages or asking.operates:
        return
    raise forbidden(session, asking, Scope.ADMIN if asking.role is Role.ADMIN else Role.ADMIN)


def _now(session: Session) -> float:
    return float(session.execute(select(db_now())).scalar_one())
