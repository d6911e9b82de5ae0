# Written by client/unasync.py from ../aio/nodes.py: change that one.
"""The boxes of an installation, and the server itself."""

from __future__ import annotations

from typing import Any

from eft.http import paths
from eft.http.responses import Param
from eft.sync.transport import Transport
from eft.types import Node


class Nodes:
    _transport: Transport

    def nodes(self) -> list[Node]:
        """The boxes of the installation."""
        return [Node.parse(raw) for raw in (self._transport.json("GET", "/nodes"))["data"]]

    def node(self, name: str) -> Node:
        return Node.parse(self._transport.json("GET", paths.node(name)))

    def drain(self, name: str, *, reason: str = "") -> Node:
        """Claim nothing more on a node and hand back what runs there, with a checkpoint of this moment."""
        params: dict[str, Param] = {"reason": reason or None}
        return Node.parse(self._transport.json("POST", f"{paths.node(name)}/drain", params=params, idempotent=True))

    def undrain(self, name: str) -> Node:
        """Let a node take jobs again."""
        return Node.parse(self._transport.json("POST", f"{paths.node(name)}/undrain", idempotent=True))

    def version(self) -> dict[str, Any]:
        """Version of the server."""
        answer: dict[str, Any] = self._transport.json("GET", "/version")
        return answer
