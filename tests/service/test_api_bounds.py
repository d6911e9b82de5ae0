"""What requests may hold: what cannot be stored, shown or said back is refused with its field, on both databases."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, update

from api.auth import service as auth
from api.auth.policy import Role, Scope
from api.http import errors
from api.notices import service as webhooks
from api.notices.schemas import WebhookWish
from core.db.tables import User, Webhook
from core.errors import Conflict
from tests.support.requests import OF_ANOTHER_PROTOCOL, filled, objects, request_of
from tests.support.world import MODEL, Caller, World

HALF, NUL, ESC, BIDI = "\ud800", "a\x00b", "\u009b31m", "a\u202eb"


def send(here: World, boss: Caller, method: str, path: str, text: str) -> Any:
    """JSON as it stands: httpx would refuse what is to be refused here."""
    headers = {"content-type": "application/json"}
    return here.ask(method, path, boss.key, content=text.encode(), headers=headers)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a document that is no object and no list."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from places(inner, (*path, name))
        case list():
            for number, inner in enumerate(value):
                yield from places(inner, (*path, number))
        case _:
            yield path


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(document, dict):
        return {name: put(inner, path[1:], value) if name == path[0] else inner for name, inner in document.items()}
    return [put(inner, path[1:], value) if number == path[0] else inner for number, inner in enumerate(document)]


def test_no_field_of_any_body_takes_what_cannot_be_kept(here: World, boss: Caller) -> None:
    """Every route that reads JSON, from the application itself, and every field of its example. On SQLite alone, which
    would keep a NUL, and answer 500 to the others: what is refused here comes to no database."""
    tried = 0
    for path, methods in here.app.openapi()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None or path in OF_ANOTHER_PROTOCOL:
                continue
            route = (method.upper(), path)
            document = request_of(here, route, here.lab)["json"]
            url = filled(path, objects(here, here.lab, fresh=False))
            for number, place in enumerate(places(document)):
                for bad in (HALF, NUL, 2**63, -(2**70))[: 1 if number else 4]:
                    reply = send(here, boss, *route[:1], url, json.dumps(put(document, place, bad)))
                    assert reply.status_code == 422, (route, place, bad, reply.status_code, reply.text)
                    assert reply.json()["error"]["field"].split(".")[0].split("[")[0] == place[0], (route, reply.text)
                    tried += 1
                for bad in ("1e400", "NaN", "-Infinity", "1" * 5000)[: 0 if number else 4]:
                    text = json.dumps(put(document, place, "HERE")).replace('"HERE"', bad)
                    reply = send(here, boss, *route[:1], url, text)
                    assert reply.status_code == 422, (route, place, bad[:9], reply.status_code, reply.text)
    assert tried > 60


def test_no_parameter_of_any_query_takes_nul(here: World, boss: Caller) -> None:
    """SQLite would look for it."""
    things = objects(here, here.lab, fresh=False)
    for path, methods in here.app.openapi()["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", []):
                if parameter["in"] != "query" or path == "/metrics":
                    continue
                reply = here.ask(method.upper(), f"{filled(path, things)}?{parameter['name']}=%00", boss.key)
                assert reply.status_code in (415, 422), (method, path, parameter["name"], reply.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/holds", {"gpus": ["box/cpu"], "for": ESC}),
        ("/holds", {"gpus": ["box/cpu"], "why": BIDI}),
        ("/holds", {"gpus": ["box/cpu"], "why": "a\nb"}),
        ("/holds", {"gpus": [ESC]}),
        ("/holds", {"gpus": ["box/cpu"], "until": "9999-12-31T23:59:59-23:59"}),
        ("/holds", {"gpus": ["box/cpu"], "until": "0001-01-01T00:00:00+23:59"}),
        ("/holds", {"gpus": ["box/cpu"], "until": "2099-01-01T00:00:00"}),
        ("/holds", {"gpus": ["box/cpu"], "until": 4e9}),
        ("/holds", {"gpus": ["box/cpu"], "now": "yes"}),
        ("/gpus/drain", {"gpus": ["box/cpu"], "why": ESC}),
        ("/maintenance", {"from": "9999-12-31T00:00:00Z", "until": "9999-12-31T23:59:59-23:59"}),
        ("/maintenance", {"from": "2099-01-01T00:00:00Z", "until": "2099-01-02T00:00:00Z", "node": ESC}),
        ("/limits", {"scope": "project", "name": "lab", "disk_bytes": 2**63}),
        ("/limits", {"scope": "project", "name": "lab", "gpu_hours_week": 1e300}),
        ("/limits", {"scope": "project", "name": "lab", "max_running": 1.5}),
        ("/limits", {"scope": "project", "name": "lab", "max_running": "1"}),
        ("/users", {"name": "x", "box_admin": "yes"}),
        ("/users", {"name": "x", "box_admin": 1}),
        ("/users", {"name": "аdmin"}),
        ("/users", {"name": "ａｄｍｉｎ"}),
        ("/users", {"name": BIDI}),
        ("/projects", {"name": "vοice"}),
        ("/keys", {"name": ESC}),
        ("/keys", {"expires_in_days": "3"}),
    ],
)
def test_what_nobody_means_is_refused_with_its_field(here: World, boss: Caller, path: str, body: Any) -> None:
    reply = here.ask("POST", path, boss.key, json=body)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error"]["field"].split(".")[0] in body


def test_names_of_one_script_are_taken(here: World, boss: Caller) -> None:
    for name in ("ada-1", "Zoë Ångström", "Иван", "田中さくら", "김 2", "Tanaka 田中"):
        assert here.ask("POST", "/users", boss.key, json={"name": name}).status_code == 201, name


@pytest.mark.parametrize(
    "path",
    [
        "/usage?until=0001-01-01",
        "/usage?since=0.5",
        "/usage?until=9999-12-31",
        "/jobs?created_after=0.5",
        "/jobs?created_after=0001-01-01T00:00:00%2B23:59",
        "/audit?since=9999-12-31T23:59:59-23:59",
        "/audit?until=5",
        "/nodes/box/drain?reason=%C2%9B31m",
    ],
)
def test_times_and_reasons_of_queries_are_bounded(here: World, boss: Caller, path: str) -> None:
    method = "POST" if "drain" in path else "GET"
    reply = here.ask(method, path, boss.key)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_request"), reply.text


def test_a_sheet_takes_no_name_for_a_formula(here: World, boss: Caller) -> None:
    evil = here.caller("=cmd|'/c calc'!A0", Role.MEMBER, Scope.WRITE)
    job = here.ask("POST", "/jobs", evil.key, json={"model": MODEL, "data": here.lab.file}).json()["id"]
    rows = list(csv.DictReader(io.StringIO(here.ask("GET", "/usage?format=csv", boss.key).text)))
    assert f"'{evil.name}" in {row["owner"] for row in rows} and evil.name not in {row["owner"] for row in rows}
    assert all(float(row["gpu_hours"]) >= 0 for row in rows)
    here.ask("POST", f"/jobs/{job}/cancel", evil.key)


def test_a_path_that_may_not_be_read_is_not_allowed(here: World, boss: Caller) -> None:
    loop = here.settings.model_roots[0] / "loop"
    loop.symlink_to(loop)
    for path in (str(loop / "x"), "/" + "n" * 5000, str(here.settings.model_roots[0] / ("n" * 300))):
        body = {"model": path, "data": here.lab.file}
        reply = here.ask("POST", "/jobs", boss.key, json=body)
        assert reply.status_code == 422, reply.text
        assert reply.json()["error"]["code"] in ("path_not_allowed", "path_not_found", "invalid_spec"), reply.text
    loop.unlink()


def test_an_error_comes_out_whatever_it_holds() -> None:
    reply = errors.render_eft(422, {"code": "x", "message": HALF, "field": float("nan")}, None)
    assert json.loads(bytes(reply.body))["error"]["message"] == "?"


@pytest.mark.both_databases
def test_nothing_is_done_that_cannot_be_answered(here: World, boss: Caller) -> None:
    """A reply is made before the commit."""
    name = here.fresh("unsaid")
    with here.database.write() as session:
        session.execute(update(User).where(User.id == here.lab.owner.user_id).values(name="owner of lab"))
    from api.http.once import Once, answer

    installation = here.app.state.eft
    with here.database.read() as session:
        principal = auth.authenticate(session, boss.key)
    assert principal is not None

    def work(session: Any) -> dict[str, Any]:
        session.add(User(id="user-" + "1" * 26, name=name))
        session.flush()
        return {"number": float("inf")}

    with pytest.raises(ValueError, match="Out of range"):
        answer(installation, principal, Once(None, "/", b""), None, work)
    with here.database.read() as session:
        assert session.execute(select(User).where(User.name == name)).all() == []


@pytest.mark.both_databases
def test_a_project_has_so_many_webhooks_also_at_once(here: World, boss: Caller) -> None:
    with here.database.read() as session:
        principal = auth.authenticate(session, boss.key)
    assert principal is not None

    def make(_: int) -> bool:
        try:
            with here.database.write() as session:
                webhooks.create(session, principal, WebhookWish(url="https://9.9.9.9/"))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(webhooks.MOST + 10)))
    with here.database.read() as session:
        found = session.execute(select(Webhook.id).where(Webhook.project_id == here.lab.id)).all()
    assert len(found) == webhooks.MOST
