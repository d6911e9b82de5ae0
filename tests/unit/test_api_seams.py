"""Seams of the API: a router brings the shape of its errors, and none of them asks the database by itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, Response

from api.events.router import EventView
from api.http import errors
from api.notices.schemas import webhook_view
from core import HOME
from core.db.tables import Webhook
from core.errors import Conflict


def flat(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    return JSONResponse({"type": error["code"], "text": error["message"]}, status, headers=dict(headers or {}))


@pytest.fixture(scope="module")
def app() -> FastAPI:
    app = FastAPI()
    for prefix in ("/v1", "/v10"):
        router = APIRouter(prefix=prefix)

        @router.get("/jobs")
        def jobs(count: int = 0) -> None:
            raise Conflict(f"not now: {count}")

        app.include_router(router)
    app.state.routes = app.routes
    errors.install(app, {"/v1": flat})
    return app


async def ask(app: FastAPI, method: str, *paths: str) -> list[httpx.Response]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        return [await client.request(method, path) for path in paths]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/jobs", "conflict"), ("GET", "/jobs?count=x", "invalid_request"), ("GET", "/none", "not_found"),
     ("PUT", "/jobs", "method_not_allowed")],
)  # fmt: skip
def test_an_error_has_the_shape_of_its_router(app: FastAPI, method: str, path: str, code: str) -> None:
    theirs, ours = asyncio.run(ask(app, method, f"/v1{path}", f"/v10{path}"))
    assert theirs.status_code == ours.status_code
    assert (set(theirs.json()), theirs.json()["type"]) == ({"type", "text"}, code)
    assert ours.json()["error"]["code"] == code


def test_a_module_with_routes_is_named_router_and_asks_no_database_itself() -> None:
    service = {"api/health.py", "api/docs/reference.py"}
    """Routes for probes and for the reference, which belong to no feature."""
    for path in sorted((HOME / "api").glob("**/*.py")):
        name, text = str(path.relative_to(HOME)), path.read_text(encoding="utf-8")
        if re.search(r"APIRouter\(", text) and name not in service:
            assert path.stem == "router" or path.stem.endswith("_router"), name
            assert not re.search(r"session\.execute\(|\bselect\(", text), f"{name}: a query belongs to the service"


def test_a_time_of_a_row_becomes_text_whatever_its_field_is_called() -> None:
    webhook = Webhook(id="hook-1", url="https://a.example", created_at=0.0, failing_since=60.0)
    view = webhook_view(webhook)
    assert (
        view["created_at"] == "1970-01-01T00:00:00.000000Z" and view["failing_since"] == "1970-01-01T00:01:00.000000Z"
    )
    assert view["disabled_at"] is None


def test_pages_hear_every_type_of_event() -> None:
    """A browser drops events whose type has no listener: the page's list is that of the API's reference."""
    told = EventView.model_json_schema()["properties"]["type"]["description"]
    script = (HOME / "api" / "web" / "static" / "page.js").read_text()
    heard = re.search(r"for \(const kind of \[(.*?)\]\)", script)
    assert heard is not None
    assert set(re.findall(r"`(\w+)`", told)) == set(re.findall(r'"(\w+)"', heard[1])) - {"change"}
