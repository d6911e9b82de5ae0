"""The boxes of an installation, and the server itself."""

from __future__ import annotations

from typing import Any

from eft.aio.transport import AsyncTransport
from eft.http import paths
from eft.http.responses import Param
from eft.types import Node


class AsyncNodes:
    _transport: AsyncTransport

    async def nodes(self) -> list[Node]:
        """The boxes of the installation."""
        return [Node.parse(raw) for raw in (await self._transport.json("GET", "/nodes"))["data"]]

    async def node(self, name: str) -> Node:
        return Node.parse(await self._transport.json("GET", paths.node(name)))

    async def drain(self, name: str, *, reason: str = "") -> Node:
        """Claim nothing more on a node and hand back what runs there, with a checkpoint of this moment."""
        params: dict[str, Param] = {"reason": reason or None}
        return Node.parse(
            await self._transport.json("POST", f"{paths.node(name)}/drain", params=params, idempotent=True)
        )

    async def undrain(self, name: str) -> Node:
        """Let a node take jobs again."""
        return Node.parse(await self._transport.json("POST", f"{paths.node(name)}/undrain", idempotent=True))

    async def version(self) -> dict[str, Any]:
        """Version of the server."""
        answer: dict[str, Any] = await self._transport.json("GET", "/version")
        return answer
