"""`POST /mcp` through the client of the `mcp` package, in both eras of the protocol."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.requests import Request

from api.auth.policy import Role, Scope
from api.mcp.caller import Caller as ToolCaller
from api.mcp.calls import Mistake, call
from api.mcp.tools import BY_NAME, MOST, ToolOfActions
from core import HOME
from tests.service.conftest import MODEL
from tests.support.world import Caller, World

CALLS = 10_000


@asynccontextmanager
async def connected(here: World, who: Caller, mode: str = "auto") -> AsyncIterator[Client]:
    transport = httpx2.ASGITransport(here.app)
    headers = {"authorization": f"Bearer {who.key}"}
    async with (
        httpx2.AsyncClient(transport=transport, headers=headers, base_url="http://api") as http,
        Client(streamable_http_client("http://api/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def with_client(here: World, who: Caller, what: Callable[[Client], Awaitable[Any]], mode: str = "auto") -> Any:
    async def run() -> Any:
        async with connected(here, who, mode) as client:
            return await what(client)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def member(here: World) -> Caller:
    return here.caller("mcp-member", Role.MEMBER, Scope.WRITE)


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28", "auto"])
def test_a_job_is_planned_submitted_followed_and_cancelled(here: World, member: Caller, mode: str) -> None:
    async def story(client: Client) -> None:
        async def ask(tool: str, **arguments: Any) -> dict[str, Any]:
            found = await client.call_tool(tool, arguments)
            assert not found.is_error, found.content
            assert found.structured_content == json.loads(found.content[0].text)
            return dict(found.structured_content)

        rows = '{"prompt": "on", "completion": "lamp.on"}\n' * 3
        file = await ask("upload_rows", rows=rows, filename="lamp.jsonl")
        job = {"model": MODEL, "data": file["id"], "method": "lora", "name": f"lamp {mode}"}
        planned = await ask("plan_job", job=job)
        assert planned["plan"].startswith("plan-") and planned["dry_run"] is True
        refused = await client.call_tool("submit_job", {"job": job | {"method": "full"}, "plan": planned["plan"]})
        assert refused.is_error and "plan_job" in refused.content[0].text
        made = await ask("submit_job", job=job, plan=planned["plan"], idempotency_key=f"key-{mode}")
        again = await ask("submit_job", job=job, plan=planned["plan"], idempotency_key=f"key-{mode}")
        assert made["id"] == again["id"]
        assert (await ask("show_job", job_id=f"lamp {mode}"))["spec"]["method"]["type"] == "lora"
        assert made["id"] in [each["id"] for each in (await ask("list_jobs", status=["queued"]))["data"]]
        seen = await ask("watch_job", job_id=made["id"])
        assert seen["data"][0]["type"] == "status" and seen["next"] == len(seen["data"])
        other_job = job | {"optimizer": {"type": "adamw", "learning_rate": 1e-3}}
        plan = (await ask("plan_job", job=other_job))["plan"]
        other = await ask("submit_job", job=other_job, plan=plan)
        compared = await ask("compare_jobs", jobs=[made["id"], other["id"]])
        assert list(compared["differ"]) == ["optimizer.learning_rate"]
        for each in (made, other):
            assert (await ask("change_job", action="cancel", job_id=each["id"]))["status"] == "cancelled"

    with_client(here, member, story, mode)


def test_a_session_is_opened_used_found_and_closed(here: World, member: Caller) -> None:
    """Operations wait, since nothing computes here; the same number again is the same operation."""

    async def story(client: Client) -> None:
        async def ask(tool: str, **arguments: Any) -> dict[str, Any]:
            found = await client.call_tool(tool, arguments)
            assert not found.is_error, found.content
            return dict(found.structured_content or {})

        made = await ask("open_session", model=MODEL, name="loop of an agent", idempotency_key="one")
        assert (await ask("open_session", model=MODEL, name="loop of an agent", idempotency_key="one")) == made
        create = {"op": "create", "model": "a", "method": {"type": "lora", "r": 4}}
        batch = {"tokens": [5, 6, 7], "lengths": [3]}
        verbs = [
            {"seq": 0, "operation": create},
            {"seq": 1, "operation": {"op": "forward_backward", "model": "a"}, "arrays": batch},
            {"seq": 2, "operation": {"op": "step", "model": "a", "learning_rate": 0.01}},
            {"seq": 1, "operation": {"op": "generate", "max_tokens": 2}, "arrays": batch},
            {"seq": 3, "operation": {"op": "save", "model": "a", "name": "first"}},
        ]
        for _ in range(2):
            sent = [await ask("session_verb", session_id=made["id"], wait=0, **verb) for verb in verbs]
            assert [(one["position"], one["status"]) for one in sent] == [(at, "waiting") for at in range(1, 6)]
        wrong = {"op": "step", "model": "a", "learning_rate": -1}
        refused = await client.call_tool("session_verb", {"session_id": made["id"], "seq": 4, "operation": wrong})
        assert refused.is_error and "learning_rate" in refused.content[0].text
        assert made["id"] in [one["id"] for one in (await ask("manage_sessions", action="list", mine=True))["data"]]
        shown = await ask("manage_sessions", action="show", session_id="loop of an agent")
        assert shown["operations"] == 5
        odd = await client.call_tool("manage_sessions", {"action": "open", "session_id": made["id"]})
        assert odd.is_error and "list, show, park, close" in odd.content[0].text
        assert (await ask("manage_sessions", action="close", session_id=made["id"]))["status"] == "closed"

    with_client(here, member, story)


def test_tools_are_those_of_the_key(here: World, member: Caller) -> None:
    async def listed(client: Client) -> list[Any]:
        return list((await client.list_tools()).tools)

    tools = with_client(here, member, listed)
    assert {tool.name for tool in tools} == {*BY_NAME, "describe", "compare_jobs"}
    assert len(tools) <= MOST
    assert len(json.dumps([tool.input_schema for tool in tools])) < 30_000, "a model reads all of it before it begins"
    viewer = here.caller("mcp-viewer", Role.VIEWER, Scope.READ)
    theirs = {tool.name: tool for tool in with_client(here, viewer, listed)}
    assert all(tool.annotations.read_only_hint for tool in theirs.values()) and "change_job" not in theirs
    assert theirs["manage_sessions"].input_schema["properties"]["action"]["enum"] == ["list", "show"]

    async def cancels(client: Client) -> Any:
        return await client.call_tool("change_job", {"action": "cancel", "job_id": f"job-{'0' * 26}"})

    refused = with_client(here, viewer, cancels)
    assert refused.is_error and json.loads(refused.content[0].text)["error"]["code"] == "missing_role"


def test_without_a_key_there_is_no_door(here: World) -> None:
    async def ask(headers: dict[str, str]) -> int:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(here.app), base_url="http://api") as http:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            return (await http.post("/mcp", json=body, headers=headers)).status_code

    assert asyncio.run(ask({})) == 401
    assert asyncio.run(ask({"authorization": "Bearer eft_wrong"})) == 401


def test_no_call_is_an_internal_error(here: World, member: Caller) -> None:
    """Calls with arguments of any shape, all through the server's own function: an error is a refusal in words."""
    draw = random.Random(0)
    names = [name for name in BY_NAME if name != "upload_rows"] + ["describe", "compare_jobs", "nothing"]
    values = [None, True, -1, 2**70, 0.5, "", "last", "job-", "\0", "../x", "x" * 300, [], ["a", 1], {"a": {"b": 1}}]
    fields = "job_id file_id job plan limit status after names points step schema jobs tail attempt".split()  # noqa: SIM905
    fields += ["resources", "name", "idempotency_key", "sha256", "rows", "session_id", "seq", "operation", "arrays"]
    actions = ["pause", "cancel", "retry", "list", "show", "park", "close", "open"]
    reached = Counter[str]()

    async def storm(count: int) -> None:
        document = here.app.openapi()
        needed = {tool.name: tool.input_schema.get("required", ()) for tool in with_schemas}
        headers = [(b"authorization", f"Bearer {member.key}".encode())]
        caller = ToolCaller(Request({"type": "http", "app": here.app, "headers": headers}))
        for _ in range(count):
            name = draw.choice(names)
            arguments = {draw.choice(fields): draw.choice(values) for _ in range(draw.randrange(4))}
            if draw.randrange(2):
                arguments |= {field: draw.choice(values) for field in needed.get(name, ())}
            if isinstance(BY_NAME.get(name), ToolOfActions) and draw.randrange(8):
                arguments["action"] = draw.choice(actions)
            try:
                reply = await call(name, arguments, caller, document)
            except Mistake as mistake:
                assert str(mistake)
                continue
            assert reply.status < 500, (name, arguments, reply)
            reached[name] += 1

    async def listed(client: Client) -> list[Any]:
        return list((await client.list_tools()).tools)

    with_schemas = with_client(here, member, listed)
    asyncio.run(storm(CALLS))
    assert sum(reached.values()) > CALLS / 10 and len(reached) > MOST / 2, reached


def test_the_page_names_every_tool() -> None:
    page = (HOME / "docs" / "mcp.md").read_text()
    assert all(f"`{name}`" in page for name in (*BY_NAME, "describe", "compare_jobs"))
