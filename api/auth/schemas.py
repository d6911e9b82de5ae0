"""What the API says about users, projects, keys and the audit, and what it takes."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.auth.policy import Principal, Right, Role, Scope
from api.auth.service import rights_of
from api.fields import Name, trimmed, unmistakable
from api.http.body import Body
from api.view import iso, view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import ApiKey, Audit, Membership, Project, User


def _no_id(name: str) -> str:
    if re.fullmatch(r"(user|proj)-[0-9a-z]{26}", name):
        raise ValueError("this looks like an id; ids and names are taken for one another")
    return name


NewName = Annotated[Name, AfterValidator(_no_id), AfterValidator(unmistakable)]
"""The name of a new user or project: it may not be mistaken for another one."""
KeyName = Annotated[Name, AfterValidator(trimmed)]
_USER, _PROJECT, _KEY_ID = (f"{kind}-01kar3v8x5m2h6n9qst4wyz0bc" for kind in ("user", "proj", "key"))
_NOW = "2026-11-21T09:20:55.004000Z"

# -- users

USER: dict[str, Any] = {"id": _USER, "name": "ada", "box_admin": False, "created_at": _NOW, "disabled_at": None}


class NewUser(Body):
    name: NewName
    """Unique on this box."""
    box_admin: bool = False
    """Looks after the box: nodes, users, projects."""


class UserChange(Body):
    """What is left out stays."""

    box_admin: bool | None = None
    disabled: bool | None = None
    """True: no key of theirs works from now on. Jobs of theirs go on."""


class UserView(AttributeDocsModel):
    """Somebody who uses this box."""

    model_config = ConfigDict(json_schema_extra={"examples": [USER]})
    id: str
    name: str
    box_admin: bool
    created_at: str
    disabled_at: str | None


class UserList(BaseModel):
    """By name."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [USER]}]})
    data: list[UserView]


def user_view(user: User) -> dict[str, Any]:
    return view_of(UserView, user)


# -- projects and their members

PROJECT: dict[str, Any] = {"id": _PROJECT, "name": "voice", "preemptible": False, "created_at": _NOW}
MEMBER: dict[str, Any] = {"user": {"id": _USER, "name": "ada"}, "role": "member", "since": _NOW}


class NewProject(Body):
    name: NewName
    """Unique on this box."""
    admin: Name | None = None
    """User (id or name) who becomes its first admin. Default: you."""


class ProjectView(AttributeDocsModel):
    """What jobs, files and keys belong to."""

    model_config = ConfigDict(json_schema_extra={"examples": [PROJECT]})
    id: str
    name: str
    preemptible: bool
    """Its running jobs make room, with a checkpoint, for waiting ones of a higher priority."""
    created_at: str


class ProjectChange(Body):
    """What its admins decide of a project."""

    preemptible: bool
    """Its running jobs make room for waiting ones of a higher priority, of whatever project: they write a checkpoint,
    wait in the queue again and go on from there (docs/queue.md)."""


class ProjectList(BaseModel):
    """By name."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [PROJECT]}]})
    data: list[ProjectView]


class NewRole(Body):
    role: Role
    """viewer reads; member also uploads, submits and stops jobs; admin also looks after members and keys."""


class Named(BaseModel):
    id: str
    name: str


class MemberView(BaseModel):
    """What a user is in a project."""

    model_config = ConfigDict(json_schema_extra={"examples": [MEMBER]})
    user: Named
    role: Role
    since: str


class MemberList(BaseModel):
    """By name."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [MEMBER]}]})
    data: list[MemberView]


class MemberRemoved(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"user": _USER, "removed": True}]})
    user: str
    removed: bool


def project_view(project: Project, preemptible: bool) -> dict[str, Any]:
    return view_of(ProjectView, project, preemptible=preemptible)


def member_view(membership: Membership, user: User) -> dict[str, Any]:
    return {
        "user": {"id": user.id, "name": user.name},
        "role": membership.role,
        "since": iso(membership.created_at),
    }


# -- keys

KEY: dict[str, Any] = {
    "id": _KEY_ID,
    "prefix": "7h2kq0zx",
    "name": "ci",
    "user": {"id": _USER, "name": "ada"},
    "project": {"id": _PROJECT, "name": "voice"},
    "scope": "write",
    "rights": ["self_rotate"],
    "state": "works",
    "created_at": _NOW,
    "expires_at": "2027-02-19T09:20:55.004000Z",
    "last_used_at": None,
    "revoked_at": None,
    "rotated_from": None,
    "made_with": "key-01kar3v8x5m2h6n9qst4wyz0bb",
    "session": False,
}
NEW_KEY: dict[str, Any] = {**KEY, "key": "eft_7h2kq0zx_…"}
REVOKED: dict[str, Any] = {**KEY, "state": "revoked", "revoked_at": _NOW, "also_revoked": []}


class KeyWish(Body):
    name: KeyName = "key"
    """To tell keys apart."""
    scope: Scope | None = None
    """The most it may be used for: read, write, admin, box. Default: all that its user may, within your key's own."""
    rights: list[Right] | None = Field(default=None, max_length=10)
    """What it may do with keys: `self_rotate`, take a successor for itself; `make_keys`, make keys and rotate others.
    Default: those of your key where no `scope` is given, and none where one is."""
    expires_in_days: float | None = Field(default=None, gt=0, le=36500)
    """Default: when your key expires, if it does."""
    user: Name | None = None
    """Another member (id or name) whose key it shall be; for admins of the project. Default: you."""
    project: Name | None = None
    """Another project (id or name); for admins of the box. Default: your key's."""


class KeyView(AttributeDocsModel):
    """A key, less its secret. It acts for one user in one project."""

    model_config = ConfigDict(json_schema_extra={"examples": [KEY]})
    id: str
    prefix: str
    """The eight characters behind `eft_`."""
    name: str
    user: Named
    project: Named
    scope: Scope
    rights: list[Right]
    """What it may do with keys."""
    state: Literal["works", "expired", "revoked"]
    created_at: str
    expires_at: str | None
    last_used_at: str | None
    """To about a minute."""
    revoked_at: str | None
    rotated_from: str | None
    """The key that it succeeds."""
    made_with: str | None
    """The key that it was made or rotated with, and ends with; null: made on the box itself."""
    session: bool
    """A browser that is signed in to the dashboard; revoking it signs it out."""


class RevokedKeyView(KeyView):
    """With those that ended with it."""

    model_config = ConfigDict(json_schema_extra={"examples": [REVOKED]})
    also_revoked: list[str]
    """Ids of keys that were made with it or succeeded it, and worked until now."""


class NewKeyView(KeyView):
    """With the key itself, this once."""

    model_config = ConfigDict(json_schema_extra={"examples": [NEW_KEY]})
    key: str


class KeyPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [KEY], "has_more": False, "next": None}]},
    )
    data: list[KeyView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


def key_view(key: ApiKey, user: User, project: Project) -> dict[str, Any]:
    state = "works"
    if key.revoked_at is not None:
        state = "revoked"
    elif key.expires_at is not None and key.expires_at <= time.time():
        state = "expired"
    whose = {"user": {"id": user.id, "name": user.name}, "project": {"id": project.id, "name": project.name}}
    session = key.session_until is not None
    return view_of(KeyView, key, **whose, rights=sorted(rights_of(key.rights)), state=state, session=session)


# -- me

_ME: dict[str, Any] = {
    "user": {"id": _USER, "name": "ada"},
    "project": {"id": _PROJECT, "name": "voice"},
    "role": "member",
    "scope": "write",
    "rights": ["make_keys", "self_rotate"],
    "box_admin": False,
    "key": _KEY_ID,
    "key_expires_at": None,
}


class Me(AttributeDocsModel):
    """Show the current key, and what it may do."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ME]})
    user: Named
    project: Named
    role: Role | None
    """Null: no longer a member of the project."""
    scope: Scope
    """Scope of the key."""
    rights: list[Right]
    """What the key may do with other keys."""
    box_admin: bool
    """The user is an admin of the box; a key of scope `box` can use that."""
    key: str
    key_expires_at: str | None


def me_view(principal: Principal) -> dict[str, Any]:
    return {
        "user": {"id": principal.user_id, "name": principal.user_name},
        "project": {"id": principal.project_id, "name": principal.project_name},
        "role": principal.role,
        "scope": principal.scope,
        "rights": sorted(principal.rights),
        "box_admin": principal.box_admin,
        "key": principal.key_id,
        "key_expires_at": iso(principal.expires_at),
    }


# -- audit

_ENTRY: dict[str, Any] = {
    "id": "audit-01kar3v8x5m2h6n9qst4wyz0bc",
    "time": _NOW,
    "action": "member.set",
    "target": _USER,
    "actor": {"id": _USER, "name": "ada"},
    "key": _KEY_ID,
    "project": {"id": _PROJECT, "name": "voice"},
    "request_id": "req-0cf2c3…",
    "data": {"user": "bob", "role": "member", "before": None},
}


class AuditEntry(AttributeDocsModel):
    """One change."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ENTRY]})
    id: str
    time: str
    action: str
    """What was done to what: `job.cancel`, `key.create`, `node.drain` …"""
    target: str
    """Id or name of what was changed."""
    actor: Named | None
    """Null: a command on the box itself, or eft of its own accord."""
    key: str | None
    """Id of the key that was used."""
    project: Named | None
    """Null: it concerns the whole box."""
    request_id: str | None
    data: dict[str, Any]
    """What has changed."""


class AuditPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [_ENTRY], "has_more": False, "next": None}]},
    )
    data: list[AuditEntry]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


def audit_view(entry: Audit, user_name: str | None, project_name: str | None) -> dict[str, Any]:
    return {
        "id": entry.id,
        "time": iso(entry.time),
        "action": entry.action,
        "target": entry.target,
        "actor": None if entry.actor_id is None else {"id": entry.actor_id, "name": user_name},
        "key": entry.key_id,
        "project": None if entry.project_id is None else {"id": entry.project_id, "name": project_name},
        "request_id": entry.request_id,
        "data": entry.data,
    }
