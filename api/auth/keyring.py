"""Keys over HTTP: whose one may list, make, rotate and revoke. Inside the caller's transaction; each change audited.

What holds for each: a key allows no more than the one it is made with, lives no longer, and ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.orm import Session

from api.auth import families, people, service
from api.auth.permit import forbidden
from api.auth.policy import Principal, Right, Role, Scope, widest
from api.auth.schemas import KeyWish
from api.errors import BadRequest
from core.db.engine import db_now, read_now
from core.db.tables import ApiKey, Project, User
from core.errors import Conflict, NotFound, Unauthorized
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.policies import audit
from core.settings import Settings

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A key with whom it belongs to."""

    key: ApiKey
    user: User
    project: Project


def page(
    session: Session, principal: Principal, *, everybody: bool, project: str | None, after: str | None, limit: int
) -> ResultPage[Shown]:
    """One's own keys of the key's project; of `everybody` in it, and of another project, for those who look after it.

    Raises Forbidden, NotFound, UnknownCursor.
    """
    where = _where(session, principal, project)
    query = _shown().where(ApiKey.project_id == where)
    if everybody or where != principal.project_id:
        _must_manage(session, principal)
    else:
        query = query.where(ApiKey.owner_id == principal.user_id)
    if after is not None:
        if session.execute(query.where(ApiKey.id == after)).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a key in this list", field="after")
        query = query.where(ApiKey.id < after)
    rows = session.execute(query.order_by(ApiKey.id.desc()).limit(limit + 1)).all()
    return ResultPage([Shown(*row) for row in rows[:limit]], len(rows) > limit)


def find(session: Session, principal: Principal, key_id: str, *, lock: bool = False) -> Shown:
    """One's own, or one that one looks after. Raises NotFound for anybody else's as for none."""
    query = _shown().where(ApiKey.id == key_id)
    if not principal.operates:
        query = query.where(ApiKey.project_id == principal.project_id)
        if not principal.manages:
            query = query.where(ApiKey.owner_id == principal.user_id)
    row = session.execute(query.with_for_update(of=ApiKey) if lock else query).one_or_none()
    if row is None:
        raise NotFound(f"there is no key `{key_id[:60]}`; `GET /keys` lists yours", field="key_id")
    return Shown(*row)


def create(session: Session, principal: Principal, wish: KeyWish, settings: Settings) -> tuple[str, Shown]:
    """Raises Forbidden, NotFound, BadRequest, Conflict; Unauthorized where the key it is made with ended just now."""
    _still_works(session, principal)
    where = _where(session, principal, wish.project)
    whose = principal.user_id
    if wish.user is not None and wish.user not in (principal.user_id, principal.user_name):
        _must_manage(session, principal)
        whose = people.user(session, wish.user).id
    elif where != principal.project_id:
        _must_manage(session, principal)
    user = session.get_one(User, whose)
    role = people.role(session, whose, where)
    if role is None:
        raise BadRequest(f"`{user.name}` is not a member of this project; make them one first", field="user")
    most = widest(role, user.box_admin)
    scope = wish.scope
    if scope is None:
        scope = most if principal.scope.reaches(most) else principal.scope
    if not principal.scope.reaches(scope):
        raise forbidden(session, principal, Scope.BOX if scope is Scope.METRICS else scope)
    if not most.reaches(scope):
        boxes = scope in (Scope.BOX, Scope.METRICS)
        what = "not an admin of the box" if boxes else f"`{role.value}` in this project"
        raise BadRequest(
            f"`{user.name}` is {what}: a key of scope `{scope.value}` would be of no use to them", field="scope"
        )
    rights = _rights(session, principal, wish)
    _room(session, whose, where, settings.keys_per_member)
    now = read_now(session)
    maker, latest = _maker(session, principal)
    expires_at = _end(latest, wish.expires_in_days, now, settings)
    key, row = service.create(
        session,
        user_id=whose,
        project_id=where,
        name=wish.name,
        scope=scope,
        expires_at=expires_at,
        created_by=principal.user_id,
        made_with=maker,
        rights=rights,
    )
    told = {
        "name": row.name,
        "prefix": row.prefix,
        "user": user.name,
        "scope": scope.value,
        "rights": row.rights,
        "expires_at": expires_at,
    }
    audit.record(session, principal, "key.create", row.id, told, project_id=where)
    return key, find(session, principal, row.id)


def rotate(
    session: Session,
    principal: Principal,
    key_id: str,
    overlap_seconds: float,
    settings: Settings,
    *,
    expires_in_days: float | None = None,
) -> tuple[str, Shown]:
    """A successor with the same name, scope, rights and end; the old key works for `overlap_seconds` more.

    `expires_in_days`: another end; a later one is for admins. Raises NotFound, Forbidden, BadRequest; Conflict for a
    key that does not work, or that has its successor already.
    """
    right = Right.SELF_ROTATE if key_id == principal.key_id else Right.MAKE_KEYS
    if right not in principal.rights:
        raise forbidden(session, principal, right)
    _still_works(session, principal)
    old = find(session, principal, key_id, lock=True)
    if not principal.scope.reaches(Scope(old.key.scope)):
        raise forbidden(session, principal, Scope(old.key.scope))
    if principal.expires_at is not None and (old.key.expires_at is None or old.key.expires_at > principal.expires_at):
        raise BadRequest(
            "a key that expires does not rotate one that lives longer: the successor would outlive it", field="key_id"
        )
    if old.key.session_until is not None:
        raise BadRequest("this is the session of a browser, which has no successor: sign in again", field="key_id")
    now = read_now(session)
    if old.key.revoked_at is not None or (old.key.expires_at is not None and old.key.expires_at <= now):
        raise Conflict("this key does not work any more; make a new one", code="key_is_over", field="key_id")
    successor = select(ApiKey.id).where(ApiKey.rotated_from == key_id, ApiKey.revoked_at.is_(None))
    if session.execute(successor.limit(1)).one_or_none() is not None:
        raise Conflict(
            "this key has been rotated already; revoke its successor first if it is lost",
            code="already_rotated",
            field="key_id",
        )
    _room(session, old.user.id, old.project.id, settings.keys_per_member, besides=key_id)
    expires_at = _successors_end(session, principal, old.key, expires_in_days, now, settings)
    ends = now + overlap_seconds if old.key.expires_at is None else min(now + overlap_seconds, old.key.expires_at)
    key, row = service.create(
        session,
        user_id=old.key.owner_id,
        project_id=old.key.project_id,
        name=old.key.name,
        scope=Scope(old.key.scope),
        expires_at=expires_at,
        created_by=principal.user_id,
        made_with=principal.key_id,
        rotated_from=key_id,
        rights=service.rights_of(old.key.rights),
    )
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(expires_at=ends))
    told = {"successor": row.id, "prefix": row.prefix, "old_key_ends_at": ends, "expires_at": row.expires_at}
    audit.record(session, principal, "key.rotate", key_id, told, project_id=old.key.project_id)
    return key, find(session, principal, row.id)


def revoke(session: Session, principal: Principal, key_id: str, *, alone: bool) -> tuple[Shown, list[str]]:
    """It stops working at once, and unless `alone` so do all that were made with it; their ids. Asking twice is fine.

    Raises NotFound; and Forbidden where one's own key of a smaller scope would revoke one of a larger.
    """
    found = find(session, principal, key_id, lock=True)
    mine = found.key.owner_id == principal.user_id
    if mine and not (principal.manages or principal.operates) and not principal.scope.reaches(Scope(found.key.scope)):
        raise forbidden(session, principal, Scope(found.key.scope))
    others = families.end(session, principal, key_id, alone=alone)
    session.refresh(found.key)
    return found, others


def _still_works(session: Session, principal: Principal) -> None:
    """Raises Unauthorized where the key that asks was revoked since it was let in. It stays locked, so that whoever
    revokes it waits, and finds what is made with it."""
    query = select(ApiKey.revoked_at).where(ApiKey.id == principal.key_id).with_for_update()
    if session.execute(query).scalar_one() is not None:
        raise Unauthorized("this API key is not known here or has been revoked")


def _rights(session: Session, principal: Principal, wish: KeyWish) -> list[Right]:
    """A key without a scope is a person's and has all that its maker's has; one with a scope has what is named."""
    if wish.rights is None:
        return [] if wish.scope is not None else sorted(principal.rights)
    for right in wish.rights:
        if right not in principal.rights:
            raise forbidden(session, principal, right)
    return sorted(set(wish.rights))


def _room(session: Session, user_id: str, project_id: str, most: int, *, besides: str | None = None) -> None:
    """Raises Conflict for a user who has so many working keys in the project. (The user's row is locked: two requests
    at once count one after the other.)"""
    session.execute(select(User.id).where(User.id == user_id).with_for_update())
    works = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > db_now())
    query = select(func.count()).where(
        ApiKey.owner_id == user_id,
        ApiKey.project_id == project_id,
        ApiKey.session_until.is_(None),
        ApiKey.revoked_at.is_(None),
        works,
    )
    if besides is not None:
        query = query.where(ApiKey.id != besides)
    if session.execute(query).scalar_one() >= most:
        raise Conflict(
            f"a user has at most {most} working keys in a project (EFT_KEYS_PER_MEMBER): revoke unused ones",
            code="too_many_keys",
        )


def _maker(session: Session, principal: Principal) -> tuple[str | None, float | None]:
    """The key that a new one ends with, and when that expires. For a session of the dashboard it is the key that the
    session was opened with: a key that somebody makes in a browser lasts when they sign out."""
    if not principal.session:
        return principal.key_id, principal.expires_at
    opened_with = session.get_one(ApiKey, principal.key_id).made_with
    assert opened_with is not None, "a session is made with a key"
    return opened_with, session.get_one(ApiKey, opened_with).expires_at


def _end(latest: float | None, days: float | None, now: float, settings: Settings) -> float | None:
    """When a new key ends. Raises BadRequest for later than `latest`, or than the box allows."""
    longest = None if settings.key_longest_days == 0 else now + settings.key_longest_days * DAY
    if days is None:
        return min((end for end in (latest, longest) if end is not None), default=None)
    wanted = now + days * DAY
    if latest is not None and wanted > latest:
        raise BadRequest(
            "a key cannot live longer than the one it is made with; leave `expires_in_days` out for as long",
            field="expires_in_days",
        )
    if longest is not None and wanted > longest:
        raise BadRequest(
            f"a key lives at most {settings.key_longest_days:g} days here (EFT_KEY_LONGEST_DAYS)",
            field="expires_in_days",
        )
    return wanted


def _successors_end(
    session: Session, principal: Principal, old: ApiKey, days: float | None, now: float, settings: Settings
) -> float | None:
    """That of the old key, unless an admin gives a later one: rotation must not keep a lent key alive."""
    if days is None:
        longest = None if settings.key_longest_days == 0 else now + settings.key_longest_days * DAY
        return min((end for end in (old.expires_at, longest) if end is not None), default=None)
    wanted = _end(_maker(session, principal)[1], days, now, settings)
    later = old.expires_at is not None and wanted is not None and wanted > old.expires_at
    if later and not (principal.manages or principal.operates):
        raise BadRequest(
            "a successor ends when the key before it would have; an admin of the project can give it a later end",
            field="expires_in_days",
        )
    return wanted


def _shown() -> Select[ApiKey, User, Project]:
    return (
        select(ApiKey, User, Project)
        .join(User, User.id == ApiKey.owner_id)
        .join(Project, Project.id == ApiKey.project_id)
        .execution_options(populate_existing=True)
    )


def _where(session: Session, principal: Principal, project: str | None) -> str:
    """The project that is meant. Raises NotFound for another one, as for none, to all but admins of the box."""
    if project is None or project in (principal.project_id, principal.project_name):
        return principal.project_id
    if not principal.operates:
        raise NotFound(people.no_project(project), field="project")
    return people.project(session, project).id


def _must_manage(session: Session, principal: Principal) -> None:
    """Keys of others are for admins of the project, and of the box."""
    if principal.manages or principal.operates:
        return
    raise forbidden(session, principal, Scope.ADMIN if principal.role is Role.ADMIN else Role.ADMIN)
