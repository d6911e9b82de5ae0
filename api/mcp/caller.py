"""A tool's requests to this API, in this process, with the key of whoever called the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answered."""

    status: int
    body: Any
    """The value of a JSON answer; the text of another one."""

    @property
    def failed(self) -> bool:
        return self.status >= 400


class Caller:
    """Sends requests through the whole application: a tool can do nothing that its caller's key could not do."""

    def __init__(self, request: Request) -> None:
        client = (request.client.host, request.client.port) if request.client is not None else ("127.0.0.1", 0)
        root = request.scope.get("root_path", "")
        self._transport = httpx.ASGITransport(request.app, client=client, root_path=root)
        kept = ("authorization", "x-request-id", "user-agent")
        self._headers = {name: request.headers[name] for name in kept if name in request.headers}

    async def __call__(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        value: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """`value` goes as JSON, `content` as it is; None in `query` is left out."""
        sent = {**self._headers, **(headers or {})}
        if value is not None:
            content, sent["content-type"] = json.dumps(value).encode(), "application/json"
        asked = {name: each for name, each in (query or {}).items() if each is not None}
        async with httpx.AsyncClient(transport=self._transport, base_url="http://mcp") as http:
            response = await http.request(method, path, params=asked, content=content, headers=sent)
        if response.headers.get("content-type", "").startswith("application/json"):
            return Reply(response.status_code, response.json())
        return Reply(response.status_code, response.text)
