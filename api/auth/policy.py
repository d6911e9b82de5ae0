"""Access policies: roles of users, scopes of keys, and the one place where a route states which of them it needs.

A route states its policy by the type of its parameter `principal` (`Reading`, `Writing`, `Managing`, `Operating`,
`Scraping`, `Knowing`, `MakingKeys`) or, without a key, by the dependency `PUBLIC`. The application does not start with
a route that states none.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of `Requires.__call__`.
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from core.jobs.base.transitions import Actor


class Role(StrEnum):
    """The role of a user in a project."""

    VIEWER = "viewer"
    """Sees everything in the project, changes nothing."""
    MEMBER = "member"
    """Also uploads, submits, and stops any job of the project."""
    ADMIN = "admin"
    """Also says who belongs to the project, looks after everybody's keys, reads the audit."""

    def reaches(self, needed: "Role") -> bool:
        return list(Role).index(self) >= list(Role).index(needed)


class Scope(StrEnum):
    """The most that a key may be used for, whatever its user may do. From `read` on, each includes the one before."""

    METRICS = "metrics"
    """The scope of Prometheus' key: an admin of the box makes it, and it opens `GET /metrics` and nothing else."""
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    BOX = "box"
    """For admins of the box: nodes, users, projects."""

    def reaches(self, needed: "Scope") -> bool:
        if Scope.METRICS in (self, needed):
            return self in (needed, Scope.BOX)  # it names all projects: no key of a project may
        return list(Scope).index(self) >= list(Scope).index(needed)


class Right(StrEnum):
    """What a key may do with other keys, beside its scope. A leaked key can do no more than this."""

    SELF_ROTATE = "self_rotate"
    """Take a successor for itself (`POST /keys/{key_id}/rotate`)."""
    MAKE_KEYS = "make_keys"
    """Make keys, and rotate others than itself."""


def widest(role: Role | None, box_admin: bool) -> Scope:
    """What a user with this role can make use of: the scope of a new key, unless another is asked for."""
    if box_admin:
        return Scope.BOX
    match role:
        case Role.ADMIN:
            return Scope.ADMIN
        case Role.MEMBER:
            return Scope.WRITE
        case Role.VIEWER | None:
            return Scope.READ


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal(Actor):
    """The user and key behind a request, as the database has them at this request."""

    user_name: str
    project_name: str
    role: Role | None
    """In the key's project; None: no longer a member of it."""
    scope: Scope
    box_admin: bool
    expires_at: float | None
    """When the key expires, Unix seconds; None: never."""
    rights: frozenset[Right]
    """What the key may do with other keys."""
    session: bool = False
    """The key is the session of a browser (api/web/sessions.py)."""

    @property
    def operates(self) -> bool:
        """May use the rights of an admin of the box with this key."""
        return self.box_admin and self.scope is Scope.BOX

    @property
    def manages(self) -> bool:
        """May use the rights of an admin of its project with this key."""
        return self.role is Role.ADMIN and self.scope.reaches(Scope.ADMIN)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a route asks for. With no scope it asks for no key."""

    scope: Scope | None = None
    role: Role | None = None
    """In the project of the key; None: any user."""
    box: Literal["no", "also", "only"] = "no"
    """also: an admin of the box passes too, with any role; only: no other user passes."""
    right: Right | None = None
    """That the key must have beside its scope."""

    def document(self) -> dict[str, Any]:
        """In OpenAPI, under `x-eft-policy`."""
        if self.scope is None:
            return {"key": False}
        asked = {"key": True, "role": self.role and self.role.value, "scope": self.scope.value, "box_admin": self.box}
        return asked if self.right is None else {**asked, "right": self.right.value}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Policy":
        """From what `document` made."""
        if not document["key"]:
            return cls()
        role, right = document["role"], document.get("right")
        return cls(
            Scope(document["scope"]),
            None if role is None else Role(role),
            document["box_admin"],
            None if right is None else Right(right),
        )

    def words(self) -> str:
        if self.scope is None:
            return "no key"
        if self.box == "only":
            narrow = f"`{self.scope.value}` or " if self.scope is not Scope.BOX else ""
            return f"an admin of the box; key of scope {narrow}`box`"
        who = "anybody with a key" if self.role is None else f"role `{self.role.value}`"
        beside = "" if self.right is None else f"; right `{self.right.value}`"
        return f"{who}; scope `{self.scope.value}`{beside}" + ("; or an admin of the box" if self.box == "also" else "")


@dataclass(frozen=True, slots=True)
class Requires:
    """Depend on it to state a route's policy. `authorise` (api/deps.py) has held the request to it before anything else
    of the route ran; here its finding is handed over."""

    policy: Policy

    async def __call__(self, request: Request) -> Principal | None:
        if self.policy.scope is None:
            return None
        principal: Principal = request.state.principal
        return principal


PUBLIC = Depends(Requires(Policy()))
Knowing = Annotated[Principal, Depends(Requires(Policy(Scope.READ)))]
"""Any user, about themselves."""
Reading = Annotated[Principal, Depends(Requires(Policy(Scope.READ, Role.VIEWER)))]
Writing = Annotated[Principal, Depends(Requires(Policy(Scope.WRITE, Role.MEMBER)))]
Managing = Annotated[Principal, Depends(Requires(Policy(Scope.ADMIN, Role.ADMIN)))]
Operating = Annotated[Principal, Depends(Requires(Policy(Scope.BOX, None, "only")))]
Scraping = Annotated[Principal, Depends(Requires(Policy(Scope.METRICS, None, "only")))]
MakingKeys = Annotated[Principal, Depends(Requires(Policy(Scope.WRITE, Role.MEMBER, "also", Right.MAKE_KEYS)))]
ReadingOrOperating = Annotated[Principal, Depends(Requires(Policy(Scope.READ, Role.VIEWER, "also")))]
ManagingOrOperating = Annotated[Principal, Depends(Requires(Policy(Scope.ADMIN, Role.ADMIN, "also")))]


class NoPolicy(Exception):
    """A route that does not say who may call it: a defect, reported when the application is built."""


def policy_of(route: APIRoute) -> Policy:
    """The one policy that a route states. Raises NoPolicy for none, and for two."""
    stated = {call.policy for call in _calls(route.dependant) if isinstance(call, Requires)}
    if len(stated) != 1:
        raise NoPolicy(
            f"{route.path} states {len(stated)} policies: give it one parameter such as `principal: Reading`"
        )
    return stated.pop()


def _calls(dependant: Dependant) -> Iterable[Any]:
    yield dependant.call
    for inner in dependant.dependencies:
        yield from _calls(inner)
