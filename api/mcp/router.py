"""`POST /mcp`: the Model Context Protocol, for assistants and agents (docs/mcp.md)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from api.auth.policy import Reading
from api.http.errors import responses

router = APIRouter(tags=["service"])

_BODY = {
    "required": True,
    "description": "One JSON-RPC message. `Accept` names `application/json` and `text/event-stream`.",
    "content": {
        "application/json": {
            "schema": {"type": "object"},
            "example": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        }
    },
}
_ANSWER = {"jsonrpc": "2.0", "id": 1, "result": {"tools": [{"name": "plan_job", "inputSchema": {"type": "object"}}]}}


class McpResponse(Response):
    """Hands the request to the protocol's own implementation, which reads the body and answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from api.mcp.server import answer  # slow, and most API processes never need it

        await answer(scope, receive, send)


@router.post(
    "/mcp",
    summary="Answer a message of the Model Context Protocol",
    response_class=McpResponse,
    responses={
        200: {"content": {"application/json": {"schema": {"type": "object"}, "example": _ANSWER}}},
        202: {"description": "A notification was taken."},
        **responses(400, 406, 413),
    },
    openapi_extra={"requestBody": _BODY},
)
async def mcp(principal: Reading) -> Response:
    """Tools over jobs, files and the queue, for assistants and agents (docs/mcp.md). A tool asks for what its own route
    asks for."""
    return McpResponse()
