"""`POST /mcp`: the Model Context Protocol, for assistants and agents (docs/mcp.md)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from api.auth.policy import Reading

router = APIRouter(include_in_schema=False)


class McpResponse(Response):
    """Hands the request to the protocol's own implementation, which reads the body and answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from api.mcp.server import answer  # slow, and most API processes never need it

        await answer(scope, receive, send)


@router.post("/mcp", response_class=McpResponse)
async def mcp(principal: Reading) -> Response:
    """Answer one message."""
    return McpResponse()
