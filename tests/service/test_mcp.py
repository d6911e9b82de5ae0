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
from api.mcp.tools import MOST, OPERATIONS
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
            assert (await ask("cancel_job", job_id=each["id"]))["status"] == "cancelled"

    with_client(here, member, story, mode)


def test_tools_are_those_of_the_key(here: World, member: Caller) -> None:
    async def listed(client: Client) -> list[Any]:
        return list((await client.list_tools()).tools)

    tools = with_client(here, member, listed)
    assert {tool.name for tool in tools} == {each.name for each in OPERATIONS} | {"describe", "compare_jobs"}
    assert len(tools) <= MOST
    assert len(json.dumps([tool.input_schema for tool in tools])) < 30_000, "a model reads all of it before it begins"
    viewer = here.caller("mcp-viewer", Role.VIEWER, Scope.READ)
    assert all(tool.annotations.read_only_hint for tool in with_client(here, viewer, listed))

    async def cancels(client: Client) -> Any:
        return await client.call_tool("cancel_job", {"job_id": "job-00000000000000000000000000"})

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
    names = [each.name for each in OPERATIONS if each.name != "upload_rows"] + ["describe", "compare_jobs", "nothing"]
    values = [None, True, -1, 2**70, 0.5, "", "last", "job-", "\0", "../x", "x" * 300, [], ["a", 1], {"a": {"b": 1}}]
    fields = "job_id file_id job plan limit status after names points step schema jobs tail attempt".split()  # noqa: SIM905
    fields += ["resources", "name", "idempotency_key", "sha256", "rows"]
    reached = Counter[str]()

    async def storm(count: int) -> None:
        document = here.app.openapi()
        headers = [(b"authorization", f"Bearer {member.key}".encode())]
        caller = ToolCaller(Request({"type": "http", "app": here.app, "headers": headers}))
        for _ in range(count):
            name = draw.choice(names)
            arguments = {draw.choice(fields): draw.choice(values) for _ in range(draw.randrange(4))}
            try:
                reply = await call(name, arguments, caller, document)
            except Mistake as mistake:
                assert str(mistake)
                continue
            assert reply.status < 500, (name, arguments, reply)
            reached[name] += 1

    asyncio.run(storm(CALLS))
    assert sum(reached.values()) > CALLS / 10 and len(reached) > MOST / 2, reached


def test_the_page_names_every_tool() -> None:
    page = (HOME / "docs" / "mcp.md").read_text()
    assert all(f"`{name}`" in page for name in (*(each.name for each in OPERATIONS), "describe", "compare_jobs"))
