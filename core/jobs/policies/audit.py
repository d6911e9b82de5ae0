"""The audit trail: who changed what, with which key, in which request. Written in the transaction of the change.

Ids, names, roles and times go in, never a key, a row of data or a prompt: admins read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from sqlalchemy import ColumnElement, insert, or_, select
from sqlalchemy.orm import Session

from core.db.tables import Audit, Project, User
from core.ids import new_id
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.transitions import Actor

ADMINISTRATIVE = ("user.", "project.", "member.", "key.", "node.", "gpu.", "hold.", "quota.", "limits.")
"""Kinds that admins of the box may read of every project: they tell nothing of its jobs and files."""

SHOWN_SECONDS = 1e-6
"""Times are shown rounded to microseconds; a query by the time of an entry must include that entry."""

Entry = tuple[Audit, str | None, str | None]
"""With the names of actor and project."""


def record(
    session: Session,
    actor: Actor | None,
    action: str,
    target: str,
    data: Mapping[str, Any] | None = None,
    *,
    project_id: str | EllipsisType | None = ...,
) -> None:
    """One change of `target`, an id or a name. `actor` None: a command on the box itself, or eft of
    its own accord.

    Admins of `project_id` may read it; by default that is the actor's project. None: only admins of the box.
    """
    if isinstance(project_id, EllipsisType):
        project_id = None if actor is None else actor.project_id
    session.execute(
        insert(Audit).values(
            id=new_id("audit"),
            action=action,
            target=target,
            actor_id=None if actor is None else actor.user_id,
            key_id=None if actor is None else actor.key_id,
            project_id=project_id,
            request_id=None if actor is None else actor.request_id,
            data=dict(data or {}),
        )
    )


def page(
    session: Session,
    *,
    project_id: str | None,
    box: bool,
    only_project: str | None = None,
    actor: str | None = None,
    action: str | None = None,
    target: str | None = None,
    key_id: str | None = None,
    request_id: str | None = None,
    since: float | None = None,
    until: float | None = None,
    after: str | None = None,
    limit: int = 50,
) -> ResultPage[Entry]:
    """All of `project_id`, and with `box` what an admin of the box may see, newest first; less what the filters leave
    out. An action with a dot at its end stands for its kind. Raises UnknownCursor.
    """
    visible: list[ColumnElement[bool]] = []
    if project_id is not None:
        visible.append(Audit.project_id == project_id)
    if box:
        visible.append(Audit.project_id.is_(None))
        visible += [Audit.action.startswith(kind, autoescape=True) for kind in ADMINISTRATIVE]
    wanted = [
        column == value
        for column, value in (
            (Audit.project_id, only_project),
            (Audit.actor_id, actor),
            (Audit.target, target),
            (Audit.key_id, key_id),
            (Audit.request_id, request_id),
        )
        if value is not None
    ]
    if action is not None:
        kind = action.endswith(".")
        wanted.append(Audit.action.startswith(action, autoescape=True) if kind else Audit.action == action)
    if since is not None:
        wanted.append(Audit.time >= since - SHOWN_SECONDS)
    if until is not None:
        wanted.append(Audit.time < until - SHOWN_SECONDS)
    if after is not None:
        if session.execute(select(Audit.id).where(Audit.id == after, or_(*visible))).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of an entry that you may read", field="after")
        wanted.append(Audit.id < after)
    rows = session.execute(
        select(Audit, User.name, Project.name)
        .outerjoin(User, User.id == Audit.actor_id)
        .outerjoin(Project, Project.id == Audit.project_id)
        .where(or_(*visible), *wanted)
        .order_by(Audit.id.desc())
        .limit(limit + 1)
    ).all()
    return ResultPage([(row[0], row[1], row[2]) for row in rows[:limit]], len(rows) > limit)
