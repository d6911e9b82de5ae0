"""The MCP server: its list of tools, and what a call of one answers.

Stateless, over both eras of the protocol (with the handshake of 2025 and without it since 2026-07-28): each request is
whole, so any API process answers it, and a restart loses nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from api.auth.permit import lacks
from api.auth.policy import Principal
from api.mcp.caller import Caller, Reply
from api.mcp.calls import COMPARED, Mistake, call
from api.mcp.tools import (
    CHOICES,
    OPERATIONS,
    Document,
    Operation,
    operation_of,
    policy_of,
    schema_of,
    schema_of_choice,
    words_of,
)
from core import __version__

INSTRUCTIONS = (
    "eft fine-tunes language models on the GPUs of this lab. A job is described by one object (the tool `describe` "
    "shows its fields), waits its turn in a shared queue, trains, and results in a model. Call "
    "`plan_job` before `submit_job`: it checks the job without storing it, and says what it takes and where it fits. "
    "A session is a training loop of your own: `open_session`, then `session_verb` for each operation. "
    "Errors name the field and the way out."
)
LARGEST_REQUEST = 4 << 20
ANSWER_CHARACTERS = 60_000
"""Characters of the longest answer; a longer one is cut, and says so."""

_READS = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
_DESCRIBE = types.Tool(
    name="describe",
    description="Show the fields of a schema: `JobSpec` is a job, and the titles of its fields are further schemas.",
    input_schema={
        "type": "object",
        "properties": {"schema": {"type": "string", "default": "JobSpec"}},
        "additionalProperties": False,
    },
    annotations=_READS,
)
_COMPARE = types.Tool(
    name="compare_jobs",
    description="Compare jobs: the fields in which their specs differ, and the result of each.",
    input_schema={
        "type": "object",
        "properties": {
            "jobs": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 2,
                "maxItems": COMPARED,
                "description": "Ids of jobs, their beginnings, or names.",
            }
        },
        "required": ["jobs"],
        "additionalProperties": False,
    },
    annotations=_READS,
)


def tools_for(principal: Principal, document: Document) -> list[types.Tool]:
    """The tools whose routes the caller's key opens."""
    found = [_tool(each, document) for each in OPERATIONS if lacks(principal, policy_of(each, document)) is None]
    return [_DESCRIBE, *found, *_choices(principal, document), _COMPARE]


def _choices(principal: Principal, document: Document) -> list[types.Tool]:
    """Tools of several actions, with those of them that the caller's key may take."""
    found = []
    for each in CHOICES:
        routes = {
            action: route
            for action, route in each.routes.items()
            if lacks(principal, policy_of(route, document)) is None
        }
        if routes:
            reads = all(route.method == "GET" for route in routes.values())
            tool = types.Tool(
                name=each.name,
                description=each.words,
                input_schema=schema_of_choice(replace(each, routes=routes), document),
                annotations=types.ToolAnnotations(
                    read_only_hint=reads, destructive_hint=not reads, open_world_hint=False
                ),
            )
            found.append(tool)
    return found


def _tool(operation: Operation, document: Document) -> types.Tool:
    words = words_of(operation, document)
    if operation.fixed.get("dry_run"):
        words = f"Check and plan a job without submitting it. {operation_of(operation, document)['description']}"
    about = types.ToolAnnotations(
        read_only_hint=operation.method == "GET" or bool(operation.fixed.get("dry_run")),
        destructive_hint=False,
        open_world_hint=False,
    )
    return types.Tool(
        name=operation.name, description=words, input_schema=schema_of(operation, document), annotations=about
    )


async def _list(context: ServerRequestContext[Any], _: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    request = _request(context)
    return types.ListToolsResult(tools=tools_for(request.state.principal, request.app.openapi()))


async def _call(context: ServerRequestContext[Any], asked: types.CallToolRequestParams) -> types.CallToolResult:
    request = _request(context)
    try:
        reply = await call(asked.name, asked.arguments or {}, Caller(request), request.app.openapi())
    except Mistake as mistake:
        return types.CallToolResult(content=[types.TextContent(text=str(mistake))], is_error=True)
    return _result(reply)


def _result(reply: Reply) -> types.CallToolResult:
    text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body, ensure_ascii=False)
    if len(text) > ANSWER_CHARACTERS:
        text = f"{text[:ANSWER_CHARACTERS]}\n… cut after {ANSWER_CHARACTERS} of {len(text)} characters: ask for less"
    structured = reply.body if isinstance(reply.body, dict) and len(text) <= ANSWER_CHARACTERS else None
    return types.CallToolResult(
        content=[types.TextContent(text=text)], structured_content=structured, is_error=reply.failed
    )


def _request(context: ServerRequestContext[Any]) -> Request:
    if not isinstance(context.request, Request):
        raise TypeError("a tool is called over HTTP")
    return context.request


SERVER: Server[Any] = Server(
    "eft", version=__version__, title="eft", instructions=INSTRUCTIONS, on_list_tools=_list, on_call_tool=_call
)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """One request, in a manager of its own: nothing outlives it."""
    manager = StreamableHTTPSessionManager(
        SERVER, json_response=True, stateless=True, max_request_body_size=LARGEST_REQUEST
    )
    async with manager.run():
        await manager.handle_request(scope, receive, send)
