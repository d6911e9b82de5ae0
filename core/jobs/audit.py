"""The audit trail: who changed what, with which key, in which request. Written in the transaction of the change.

Ids, names, roles and times go in, never a key, a row of data or a prompt: admins read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from core.db.tables import Audit
from core.ids import new_id
from core.jobs.transitions import Actor


def record(
    session: Session,
    actor: Actor | None,
    action: str,
    target: str,
    data: Mapping[str, Any] | None = None,
    *,
    project_id: str | EllipsisType | None = ...,
) -> None:
    """One change of `target`, an id or a name. `actor` None: a command on the box itself.

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
