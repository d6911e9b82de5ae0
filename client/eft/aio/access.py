"""Users, projects, members, keys and the audit: what admins look after, and everybody's own keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from eft.aio.transport import AsyncTransport
from eft.http.paths import name as _part
from eft.http.responses import Param

Raw = dict[str, Any]


class AsyncAccess:
    """`client.access`. Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def me(self) -> Raw:
        """Whom the key acts for, and what it may do."""
        return await self._json("GET", "/me")

    # --- keys

    async def keys(self, *, everybody: bool = False, project: str | None = None) -> list[Raw]:
        """Your keys in this project, newest first; `everybody`: the whole project's, for its admins."""
        return await self._pages("/keys", {"all": "true" if everybody else None, "project": project}, None)

    async def create_key(
        self,
        name: str = "key",
        *,
        scope: str | None = None,
        rights: list[str] | None = None,
        expires_in_days: float | None = None,
        user: str | None = None,
        project: str | None = None,
    ) -> Raw:
        """`answer["key"]` is the key: it is shown this once."""
        wish = {
            "name": name,
            "scope": scope,
            "rights": rights,
            "expires_in_days": expires_in_days,
            "user": user,
            "project": project,
        }
        body = {field: value for field, value in wish.items() if value is not None}
        return await self._json("POST", "/keys", body=body)

    async def rotate_key(
        self, key_id: str, *, overlap_hours: float | None = None, expires_in_days: float | None = None
    ) -> Raw:
        """A successor, in `answer["key"]`; the old key works for `overlap_hours` more (default: a day). It ends when
        the old key would have; `expires_in_days` gives it another end, a later one for admins alone."""
        params: dict[str, Param] = {"overlap_hours": overlap_hours, "expires_in_days": expires_in_days}
        return await self._json("POST", f"/keys/{_part(key_id)}/rotate", params=params)

    async def revoke_key(self, key_id: str, *, alone: bool = False) -> Raw:
        """With it end the keys that were made with it and its successors (`answer["also_revoked"]`), unless `alone`."""
        return await self._json("DELETE", f"/keys/{_part(key_id)}", params={"alone": "true" if alone else None})

    # --- users, for admins of the box

    async def users(self) -> list[Raw]:
        data: list[Raw] = (await self._json("GET", "/users"))["data"]
        return data

    async def create_user(self, name: str, *, box_admin: bool = False) -> Raw:
        return await self._json("POST", "/users", body={"name": name, "box_admin": box_admin})

    async def change_user(self, user: str, *, box_admin: bool | None = None, disabled: bool | None = None) -> Raw:
        """`user` is an id or a name; what is None stays."""
        return await self._json("PATCH", f"/users/{_part(user)}", body={"box_admin": box_admin, "disabled": disabled})

    # --- projects and their members

    async def projects(self) -> list[Raw]:
        data: list[Raw] = (await self._json("GET", "/projects"))["data"]
        return data

    async def create_project(self, name: str, *, admin: str | None = None) -> Raw:
        """`admin`: who becomes its first admin; default: you. For admins of the box."""
        return await self._json("POST", "/projects", body={"name": name, "admin": admin})

    @asynccontextmanager
    async def export(self, project: str, *, checkpoints: bool = False) -> AsyncIterator[AsyncIterator[bytes]]:
        """Everything that the project of your key owns, as a tar archive, while the server makes it; for its admins.
        `eft.archive.save` keeps it and holds it against its manifest."""
        params: dict[str, Param] = {"checkpoints": "true" if checkpoints else None}
        path = f"/projects/{_part(project)}/export"
        async with self._transport.stream("GET", path, params=params, timeout=300.0) as response:
            yield response.aiter_bytes(1 << 20)

    async def members(self, project: str) -> list[Raw]:
        data: list[Raw] = (await self._json("GET", f"/projects/{_part(project)}/members"))["data"]
        return data

    async def set_project(self, project: str, *, preemptible: bool) -> Raw:
        """`preemptible`: its running jobs make room, with a checkpoint, for waiting ones of a higher priority."""
        return await self._json("PATCH", f"/projects/{_part(project)}", body={"preemptible": preemptible})

    async def set_member(self, project: str, user: str, role: str) -> Raw:
        """Take somebody in, or change their role: viewer, member or admin."""
        return await self._json("PUT", f"/projects/{_part(project)}/members/{_part(user)}", body={"role": role})

    async def remove_member(self, project: str, user: str) -> Raw:
        """Their keys for the project are revoked with it."""
        return await self._json("DELETE", f"/projects/{_part(project)}/members/{_part(user)}")

    # --- audit

    async def audit(self, *, limit: int | None = 50, **filters: Param) -> list[Raw]:
        """Changes, newest first, at most `limit` (None: all). Filters are the route's: actor, action, target, key,
        request_id, since, until, project."""
        return await self._pages("/audit", filters, limit)

    # ---

    async def _json(
        self, method: str, path: str, *, params: dict[str, Param] | None = None, body: Raw | None = None
    ) -> Raw:
        # POSTs go out once: a second key, made because an answer was lost, is one that nobody knows of.
        raw: Raw = await self._transport.json(method, path, params=params, body=body)
        return raw

    async def _pages(self, path: str, filters: dict[str, Param], limit: int | None) -> list[Raw]:
        rows: list[Raw] = []
        after: str | None = None
        while limit is None or len(rows) < limit:
            size = 200 if limit is None else min(200, limit - len(rows))
            page = await self._json("GET", path, params=filters | {"limit": size, "after": after})
            rows += page["data"]
            after = page["next"]
            if after is None:
                break
        return rows
