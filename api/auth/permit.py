"""Holding somebody to a policy, and saying what they lack and who can give it."""

from __future__ import annotations

from typing import Literal

from sqlalchemy.orm import Session

from api.auth import people
from api.auth.policy import Policy, Principal, Right, Role, Scope
from core.errors import Forbidden

Lacking = Literal["no box admin"] | Role | Scope | Right
"""What somebody would need and has not."""


def lacks(principal: Principal, policy: Policy) -> Lacking | None:
    """What is missing first: the role of the user, then the scope of the key, then its right."""
    missing = _lacks_role_or_scope(principal, policy)
    if missing is None and policy.right is not None and policy.right not in principal.rights:
        return policy.right
    return missing


def _lacks_role_or_scope(principal: Principal, policy: Policy) -> Lacking | None:
    if policy.box != "no" and principal.operates:
        return None
    if policy.box == "only":
        if not principal.box_admin:
            return "no box admin"
        return None if policy.scope is None or principal.scope.reaches(policy.scope) else policy.scope
    if policy.role is not None and (principal.role is None or not principal.role.reaches(policy.role)):
        return policy.role
    if policy.scope is not None and not principal.scope.reaches(policy.scope):
        return policy.scope
    return None


def forbidden(session: Session, principal: Principal, missing: Lacking) -> Forbidden:
    """The answer to somebody who lacks it."""
    match missing:
        case "no box admin":
            whom = _names(people.admins(session, None), "an admin of the box")
            return Forbidden(
                f"only admins of the box can do this, and `{principal.user_name}` is not one: ask {whom}",
                code="box_admin_only",
            )
        case Role():
            whom = _names(
                people.admins(session, principal.project_id), f"an admin of the project `{principal.project_name}`"
            )
            if principal.role is None:
                return Forbidden(
                    f"`{principal.user_name}` is not a member of the project `{principal.project_name}`: ask {whom}",
                    code="not_a_member",
                )
            return Forbidden(
                f"this needs the role `{missing.value}` in the project `{principal.project_name}`, and "
                f"`{principal.user_name}` is `{principal.role.value}` there: ask {whom}",
                code="missing_role",
            )
        case Scope():
            whom = _names(people.admins(session, principal.project_id), "an admin of the project")
            return Forbidden(
                f"this needs a key of scope `{missing.value}`, and this one has `{principal.scope.value}`: use another "
                f"key of yours, or ask {whom} for one",
                code="missing_scope",
            )
        case Right():
            whom = _names(people.admins(session, principal.project_id), "an admin of the project")
            return Forbidden(
                f"this needs a key with the right `{missing.value}`, and this one was made without it: use another key "
                f"of yours, or ask {whom} for one",
                code="missing_right",
            )


def _names(names: list[str], nobody: str) -> str:
    return " or ".join(f"`{name}`" for name in names) or nobody
