"""Users, projects, and who is what in which: reads and writes inside the caller's transaction, each change audited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.auth.policy import Principal, Role
from core.db.engine import db_now
from core.db.tables import ApiKey, Membership, Project, User
from core.errors import Conflict, NotFound
from core.ids import new_id
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit

T = TypeVar("T", User, Project)
ASK = 5
"""At most so many names of whom to ask."""


# -- looking


def user(session: Session, id_or_name: str, *, field: str = "user") -> User:
    """Raises NotFound."""
    return _find(
        session, User, id_or_name, f"there is no user `{id_or_name[:60]}`; an admin of the box makes users", field
    )


def project(session: Session, id_or_name: str, *, field: str = "project") -> Project:
    """Raises NotFound."""
    return _find(session, Project, id_or_name, no_project(id_or_name), field)


def no_project(id_or_name: str) -> str:
    """Said of one that is not there as of one that is not theirs."""
    return f"there is no project `{id_or_name[:60]}` for this key; `GET /projects` lists them"


def role(session: Session, user_id: str, project_id: str) -> Role | None:
    found = session.execute(
        select(Membership.role).where(Membership.user_id == user_id, Membership.project_id == project_id)
    ).scalar_one_or_none()
    return None if found is None else Role(found)


def members(session: Session, project_id: str) -> Sequence[tuple[Membership, User]]:
    """By name."""
    rows = session.execute(
        select(Membership, User)
        .join(User, User.id == Membership.user_id)
        .where(Membership.project_id == project_id)
        .order_by(User.name)
    )
    return [(membership, user) for membership, user in rows]


def admins(session: Session, project_id: str | None) -> list[str]:
    """Names of whom to ask: admins of a project, or (None) of the box."""
    query = select(User.name).where(User.disabled_at.is_(None)).order_by(User.name).limit(ASK)
    if project_id is None:
        query = query.where(User.box_admin)
    else:
        query = query.join(Membership, Membership.user_id == User.id).where(
            Membership.project_id == project_id, Membership.role == Role.ADMIN.value
        )
    return list(session.execute(query).scalars())


# -- changing


def add_user(session: Session, actor: Actor | None, name: str, *, box_admin: bool = False) -> User:
    """Raises Conflict for a name that is taken."""
    made = _add(session, User(id=new_id("user"), name=name, box_admin=box_admin), "user")
    audit.record(session, actor, "user.create", made.id, {"name": name, "box_admin": box_admin}, project_id=None)
    return made


def add_project(session: Session, actor: Actor | None, name: str) -> Project:
    """A project without members. Raises Conflict for a name that is taken."""
    made = _add(session, Project(id=new_id("proj"), name=name), "project")
    audit.record(session, actor, "project.create", made.id, {"name": name}, project_id=made.id)
    return made


def change_user(
    session: Session, actor: Actor | None, found: User, *, box_admin: bool | None = None, disabled: bool | None = None
) -> None:
    """Raises Conflict if the box would have no admin left."""
    changes: dict[str, Any] = {}
    if box_admin is not None and box_admin != found.box_admin:
        changes["box_admin"] = box_admin
    if disabled is not None and disabled != (found.disabled_at is not None):
        changes["disabled"] = disabled
    if not changes:
        return
    if found.box_admin and (changes.get("box_admin") is False or changes.get("disabled")):
        _lock(session)
        others = select(func.count()).select_from(User).where(User.box_admin, User.disabled_at.is_(None))
        if session.execute(others.where(User.id != found.id)).scalar_one() == 0:
            raise Conflict(
                f"`{found.name}` is the only admin of this box; make another user one first",
                code="last_admin",
                field="box_admin" if "box_admin" in changes else "disabled",
            )
    values: dict[str, Any] = {}
    if "box_admin" in changes:
        values["box_admin"] = changes["box_admin"]
    if "disabled" in changes:
        values["disabled_at"] = db_now() if changes["disabled"] else None
    session.execute(update(User).where(User.id == found.id).values(**values))
    session.refresh(found)
    audit.record(session, actor, "user.change", found.id, {"name": found.name, **changes}, project_id=None)


def set_member(session: Session, actor: Actor | None, project_id: str, member: User, given: Role) -> Membership:
    """Take a user into a project, or change their role there. Raises Conflict where no admin would be left."""
    before = role(session, member.id, project_id)
    if before is Role.ADMIN and given is not Role.ADMIN:
        _one_admin_stays(session, project_id, member)
    if before is None:
        dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
        row = dialect.insert(Membership).values(user_id=member.id, project_id=project_id, role=given.value)
        both = [Membership.user_id, Membership.project_id]  # somebody else may have done so at this very moment
        session.execute(row.on_conflict_do_update(index_elements=both, set_={"role": given.value}))
    elif before is not given:
        session.execute(
            update(Membership)
            .where(Membership.user_id == member.id, Membership.project_id == project_id)
            .values(role=given.value)
        )
    if before is not given:
        told = {"user": member.name, "role": given.value, "before": before and before.value}
        audit.record(session, actor, "member.set", member.id, told, project_id=project_id)
    return session.execute(
        select(Membership)
        .where(Membership.user_id == member.id, Membership.project_id == project_id)
        .execution_options(populate_existing=True)
    ).scalar_one()


def remove_member(session: Session, actor: Actor | None, project_id: str, member: User) -> None:
    """Their keys for this project are revoked with it: taking them back revives none. Raises NotFound, Conflict."""
    before = role(session, member.id, project_id)
    if before is None:
        raise NotFound(f"`{member.name}` is not a member of this project", field="user")
    if before is Role.ADMIN:
        _one_admin_stays(session, project_id, member)
    session.execute(delete(Membership).where(Membership.user_id == member.id, Membership.project_id == project_id))
    revoked = session.execute(
        update(ApiKey)
        .where(ApiKey.owner_id == member.id, ApiKey.project_id == project_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=db_now())
        .returning(ApiKey.id)
    ).scalars()
    told = {"user": member.name, "before": before.value, "revoked_keys": sorted(revoked)}
    audit.record(session, actor, "member.remove", member.id, told, project_id=project_id)


def _one_admin_stays(session: Session, project_id: str, leaving: User) -> None:
    _lock(session)
    others = (
        select(func.count())
        .select_from(Membership)
        .join(User, User.id == Membership.user_id)
        .where(
            Membership.project_id == project_id,
            Membership.role == Role.ADMIN.value,
            Membership.user_id != leaving.id,
            User.disabled_at.is_(None),
        )
    )
    if session.execute(others).scalar_one() == 0:
        raise Conflict(
            f"`{leaving.name}` is the only admin of this project; make another member one first",
            code="last_admin",
            field="user",
        )


def _lock(session: Session) -> None:
    """Two admins who remove each other at the same moment wait for one another here. (SQLite has one writer anyway.)"""
    session.execute(select(User.id).where(User.box_admin).order_by(User.id).with_for_update()).all()


def _find(session: Session, table: type[T], id_or_name: str, words: str, field: str) -> T:
    """A name may look like an id; the id goes first."""
    found = session.execute(
        select(table)
        .where((table.id == id_or_name) | (table.name == id_or_name))
        .order_by(table.id != id_or_name)
        .limit(1)
    ).scalar_one_or_none()
    if found is None:
        raise NotFound(words, field=field)
    return found


def _add(session: Session, row: T, what: str) -> T:
    taken = Conflict(f"there is a {what} `{row.name}` already", code="name_taken", field="name")
    table = type(row)
    if session.execute(select(table.id).where(table.name == row.name)).one_or_none() is not None:
        raise taken
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError as error:  # somebody else at this very moment
        raise taken from error
    session.refresh(row)
    return row


# -- lists


def users(session: Session) -> Sequence[User]:
    """All users, by name."""
    return session.execute(select(User).order_by(User.name)).scalars().all()


def projects(session: Session, only: str | None) -> Sequence[Project]:
    """All projects by name, or the one with the id `only`."""
    query = select(Project).order_by(Project.name)
    return session.execute(query if only is None else query.where(Project.id == only)).scalars().all()


def reachable_project(session: Session, principal: Principal, id_or_name: str) -> Project:
    """Raises NotFound for another project than the key's, as for none, to all but admins of the box."""
    if id_or_name in (principal.project_id, principal.project_name):
        return session.get_one(Project, principal.project_id)
    if not principal.operates:
        raise NotFound(no_project(id_or_name), field="project")
    return project(session, id_or_name)
