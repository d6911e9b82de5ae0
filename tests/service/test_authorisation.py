"""Every route × every kind of key × one's own, somebody else's and no object: from the application itself, so that a
route cannot be forgotten. What each route asks for is read from OpenAPI (`x-eft-policy`); what that means is written
down here a second time.
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from sqlalchemy import func, select

from api.auth.policy import NoPolicy, Reading, Right, Role, Scope, Writing, policy_of
from api.docs import policy_table
from api.web.router import ROUTERS
from core.db.tables import Audit, Job
from core.jobs.lifecycle.registry import entries
from core.jobs.lifecycle.submit import cancel, submit
from tests.support.requests import OF_ANOTHER_PROTOCOL, filled, objects, request_of
from tests.support.world import MODEL, SHA, Caller, Project, World

OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/version"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
}
"""All that answers without a key."""
PAGES = {("GET", "/docs"), ("GET", "/openapi.json")}
"""Those of them that are not in the document."""
LINKS = {("GET", "/downloads/{token}/{name}")}
"""What answers to a signed link in the place of a key, and is not in the document (test_tinker.py)."""
OWN_KEYS = {("POST", "/keys/{key_id}/rotate"), ("DELETE", "/keys/{key_id}")}
"""Changes that viewers may make: of their own keys."""
TOOLS = {("POST", path) for path in OF_ANOTHER_PROTOCOL}
"""They change nothing themselves: each tool asks for what its own route asks for."""
FEW = {"viewer", "member", "boss", "who has left", "member's machine"}
ROLES, SCOPES = ["viewer", "member", "admin"], ["metrics", "read", "write", "admin", "box"]
BOX_LEVEL = {"name", "user"}
"""Parameters whose objects belong to no project."""
USED_UP = {"file_id", "session_id", "key_id", "webhook_id", "delivery_id", "user"}
"""Parameters whose objects a change may end: each such request has new ones."""


@pytest.fixture(scope="module")
def callers(here: World) -> dict[str, Caller]:
    """By name: role in the project, scope of the key, admin of the box."""
    made = [
        here.caller("viewer", Role.VIEWER, Scope.READ),
        here.caller("viewer with a wide key", Role.VIEWER, Scope.ADMIN),
        here.caller("member", Role.MEMBER, Scope.WRITE),
        here.caller("member with a narrow key", Role.MEMBER, Scope.READ),
        here.caller("member's machine", Role.MEMBER, Scope.WRITE, rights=[]),
        here.caller("admin", Role.ADMIN, Scope.ADMIN),
        here.caller("admin with a narrow key", Role.ADMIN, Scope.WRITE),
        here.caller("boss", Role.VIEWER, Scope.BOX, box_admin=True),
        here.caller("boss with a narrow key", Role.VIEWER, Scope.READ, box_admin=True),
        here.caller("boss of no project", None, Scope.BOX, box_admin=True),
        here.caller("who has left", None, Scope.BOX),
        here.caller("boss's prometheus", Role.ADMIN, Scope.METRICS, box_admin=True),
        here.caller("prometheus of a member", Role.MEMBER, Scope.METRICS),
    ]
    if not here.database.is_sqlite:  # the same code decides there: one of each kind is enough
        made = [caller for caller in made if caller.name in FEW]
    return {caller.name: caller for caller in made}


TINKER = "/api/v1/"
"""Routes of another protocol, which are not in the document: `test_routes_of_tinker_ask_for_a_key_too`."""


def routes(here: World) -> list[tuple[str, str]]:
    return sorted(route for route in here.app.state.policies if not route[1].startswith(TINKER))


def guarded(here: World) -> list[tuple[str, str]]:
    return [route for route in routes(here) if route not in OPEN | LINKS]


def stated(here: World, route: tuple[str, str]) -> dict[str, Any]:
    """What OpenAPI says that a route asks for; HEAD is not in it and asks what GET asks."""
    method, path = route
    operation = here.app.openapi()["paths"][path]["get" if method == "HEAD" else method.lower()]
    return dict(operation["x-eft-policy"])


def refusal(policy: dict[str, Any], who: Caller) -> str | None:
    """The code of the 403 that this caller must get, or None."""
    missing = _lacks_role_or_scope(policy, who)
    if missing is None and "right" in policy and policy["right"] not in who.rights:
        return "missing_right"
    return missing


def _lacks_role_or_scope(policy: dict[str, Any], who: Caller) -> str | None:
    operates = who.box_admin and who.scope == "box"
    if policy["box_admin"] in ("also", "only") and operates:
        return None
    if policy["box_admin"] == "only":
        if not who.box_admin:
            return "box_admin_only"
        return None if policy["scope"] == who.scope == "metrics" else "missing_scope"
    if policy["role"] is not None:
        if who.role is None:
            return "not_a_member"
        if ROLES.index(who.role) < ROLES.index(policy["role"]):
            return "missing_role"
    return "missing_scope" if SCOPES.index(who.scope) < SCOPES.index(policy["scope"]) else None


def send(here: World, route: tuple[str, str], key: str | None, project: Project | None, things: dict[str, str]) -> Any:
    request = request_of(here, route, project or here.lab)
    return here.ask(route[0], filled(route[1], things), key, **request)


def belongs_to_a_project(path: str) -> bool:
    return bool(set(re.findall(r"{(\w+)}", path)) - BOX_LEVEL - {"path"})


# -- what the routes ask for


def test_every_route_states_a_policy_and_the_document_shows_it(here: World) -> None:
    found: set[tuple[str, str]] = set()
    pages = [one for router in ROUTERS for one in router.routes if isinstance(one, APIRoute)]
    dashboard = {(method, one.path_format) for one in pages for method in one.methods or ()}
    for route in here.app.routes:
        inner = getattr(route, "original_router", None)
        assert inner is not None, f"{route} goes past the policies: use a router"
        for one in inner.routes:
            assert isinstance(one, APIRoute), one
            found |= {(method, one.path_format) for method in one.methods or ()}
    assert dashboard <= found
    found -= {route for route in found if route[1].startswith(TINKER)}
    found -= dashboard  # its pages are held to their policies in test_dashboard.py
    assert found == set(routes(here))
    shown = {(method.upper(), path) for path, methods in here.app.openapi()["paths"].items() for method in methods}
    assert found - shown <= PAGES | LINKS | {route for route in found if route[0] == "HEAD"}
    for method, path in shown:
        operation = here.app.openapi()["paths"][path][method.lower()]
        assert operation["x-eft-policy"]["key"] is ((method, path) not in OPEN), (method, path)
        assert ("security" in operation) is ((method, path) not in OPEN), (method, path)
        if (method, path) not in OPEN:
            assert {"401", "403"} <= set(operation["responses"]), (method, path)


def test_changes_ask_for_more_than_reading(here: World) -> None:
    """Of whatever the routes state: nobody changes anything with a viewer's role or a reading key."""
    for method, path in guarded(here):
        policy = stated(here, (method, path))
        if method not in ("GET", "HEAD") and (method, path) not in OWN_KEYS | TOOLS:
            assert policy["scope"] != "read", (method, path)
            assert policy["role"] in ("member", "admin") or policy["box_admin"] == "only", (method, path)
        if path.startswith(("/users", "/nodes")) and method not in ("GET", "HEAD"):
            assert policy["box_admin"] == "only", (method, path)
        if path.startswith(("/jobs", "/files")):
            assert policy["box_admin"] == "no", "admins of the box do not look into projects"


def test_a_key_for_metrics_opens_one_door(here: World) -> None:
    scraper = here.caller("boss's prometheus", Role.ADMIN, Scope.METRICS, box_admin=True)
    assert [route for route in guarded(here) if refusal(stated(here, route), scraper) is None] == [("GET", "/metrics")]


def test_a_route_without_a_policy_cannot_be_added() -> None:
    router = APIRouter()

    @router.get("/forgotten")
    async def forgotten() -> None: ...

    @router.get("/twice")
    async def twice(principal: Reading, again: Writing) -> None: ...

    for route in router.routes:
        assert isinstance(route, APIRoute)
        with pytest.raises(NoPolicy, match=route.path):
            policy_of(route)


def test_the_page_for_people_is_fresh() -> None:
    written = policy_table.PAGE.read_text()
    assert policy_table.page(written) == written, "run `python -m api.docs.policy_table`"


# -- what they do


def test_without_a_good_key_nothing_answers(here: World) -> None:
    disabled = here.caller("disabled", Role.ADMIN, Scope.BOX, box_admin=True)
    here.disable(disabled)
    expired = here.caller("late", Role.ADMIN, Scope.BOX, expires_at=time.time() - 1).key
    wrong = {
        None: "missing_api_key",
        "eft_00000000_" + "0" * 40: "invalid_api_key",
        here.caller("revoked", Role.ADMIN, Scope.BOX, revoked_at=1.0).key: "invalid_api_key",
        disabled.key: "invalid_api_key",
        expired: "expired_api_key",
    }
    things = objects(here, here.lab, fresh=False)
    for route in guarded(here):
        for key, code in wrong.items():
            reply = send(here, route, key, here.lab, things)
            assert reply.status_code == 401, (route, code, reply.text)
            assert reply.headers["www-authenticate"] == "Bearer"
            if route[0] != "HEAD":
                assert reply.json()["error"]["code"] == code, (route, reply.text)
    for method, path in OPEN:
        assert here.ask(method, path).status_code in (200, 503)


def test_who_may_not_is_told_what_is_missing_and_changes_nothing(here: World, callers: dict[str, Caller]) -> None:
    with here.database.read() as session:
        before = session.execute(select(func.count()).select_from(Audit)).scalar_one()
        jobs = session.execute(select(func.count()).select_from(Job)).scalar_one()
    seen, told = set(), set()
    projects = (here.lab, here.rivals, None)
    nothing_fresh = {project: objects(here, project, fresh=False) for project in projects}
    for at, who in enumerate(callers.values()):
        for number, route in enumerate(guarded(here)):
            code = refusal(stated(here, route), who)
            if code is None:
                continue
            seen.add(code)
            answers = set()
            # Every route is asked by every caller. For whom a route and a reason come first, whatever the objects are;
            # for all others, of one project each, in turn: every pair of caller, route and project is there.
            asked = projects if (route, code) not in told else (projects[(at + number) % len(projects)],)
            told.add((route, code))
            for project in asked:
                reply = send(here, route, who.key, project, nothing_fresh[project])
                assert reply.status_code == 403, (who.name, route, reply.text)
                if route[0] != "HEAD":
                    error = reply.json()["error"]
                    assert error["code"] == code, (who.name, route, error)
                    answers.add(error["message"])
            assert len(answers) <= 1, "it hangs on what was asked for"
            for message in answers:
                assert re.search(r"`(owner of lab|root)`", message), f"whom to ask: {message}"
    assert seen >= {"missing_role", "box_admin_only", "not_a_member", "missing_right"}
    assert "missing_scope" in seen or not here.database.is_sqlite
    with here.database.read() as session:
        assert session.execute(select(func.count()).select_from(Audit)).scalar_one() == before
        assert session.execute(select(func.count()).select_from(Job)).scalar_one() == jobs


@pytest.mark.both_databases
def test_who_may_gets_an_answer_about_their_own(here: World, callers: dict[str, Caller]) -> None:
    """Who may is decided by the same code on both databases. What differs is how they answer: on PostgreSQL each route
    is asked by one member of the project and by one admin of the box."""
    asked = set()
    for who in callers.values():
        for route in guarded(here):
            if refusal(stated(here, route), who) is not None:
                continue
            if not here.database.is_sqlite and (route, who.box_admin) in asked:
                continue
            asked.add((route, who.box_admin))
            fresh = route[0] not in ("GET", "HEAD") and bool(USED_UP & set(re.findall(r"{(\w+)}", route[1])))
            things = objects(here, here.lab, fresh=fresh)
            if route == ("DELETE", "/jobs/{job_id}"):
                with here.database.write() as session:
                    things["job_id"] = submit(session, here.lab.owner, here.spec(here.lab.file)).id
                    cancel(session, here.lab.owner, things["job_id"])
            if route == ("DELETE", "/models/{model_id}"):
                with here.database.write() as session:
                    made = submit(session, here.lab.owner, here.spec(here.lab.file))
                    cancel(session, here.lab.owner, made.id)
                    entries.register(session, made, ["adapter/a.safetensors"])
                    things["model_id"] = entries.id_of(made.id)
            if route == ("DELETE", "/sweeps/{sweep_id}"):
                things["sweep_id"] = here.sweep(here.lab.owner, here.lab.file)
            if route == ("DELETE", "/pipelines/{pipeline_id}"):
                things["pipeline_id"] = here.pipeline(here.lab.owner, here.lab.file)
            if route in OWN_KEYS or route == ("DELETE", "/keys/{key_id}"):
                things["key_id"] = _own_key(here, who)
            reply = send(here, route, who.key, here.lab, things)
            if route == ("POST", "/keys/{key_id}/rotate") and Right.MAKE_KEYS not in who.rights:
                assert reply.json()["error"]["code"] == "missing_right", "this one is not the key that asks"
                continue
            assert reply.status_code < 500 and reply.status_code not in (401, 403, 404), (
                who.name,
                route,
                reply.status_code,
                reply.text,
            )


def test_what_is_somebody_elses_is_not_there(here: World, callers: dict[str, Caller]) -> None:
    """The same answer, to the letter, as for what nobody has."""
    checked = 0
    theirs, none = objects(here, here.rivals, fresh=False), objects(here, None, fresh=False)
    for who in callers.values():
        for route in guarded(here):
            policy = stated(here, route)
            if refusal(policy, who) is not None or not belongs_to_a_project(route[1]):
                continue
            if policy["box_admin"] == "also" and who.box_admin and who.scope == "box":
                continue  # looking after projects and keys is what they are for
            if route == ("POST", "/keys/{key_id}/rotate") and Right.MAKE_KEYS not in who.rights:
                continue
            foreign = send(here, route, who.key, here.lab, theirs)
            absent = send(here, route, who.key, here.lab, none)
            assert foreign.status_code == 404, (who.name, route, foreign.text)
            assert plain(foreign, theirs) == plain(absent, none), (who.name, route)
            checked += 1
    assert checked > (80 if here.database.is_sqlite else 20)


def plain(reply: httpx.Response, things: dict[str, str]) -> tuple[int, dict[str, str], str]:
    text = re.sub(r'"request_id":"[^"]*"', "", reply.text)
    for thing in things.values():
        text = text.replace(f"`{thing}`", "IT")
    headers = {name: value for name, value in reply.headers.items() if name not in ("x-request-id", "content-length")}
    return reply.status_code, headers, text


def _own_key(here: World, who: Caller) -> str:
    """The id of a new key of the caller's own."""
    return here.ask("GET", "/me", here.caller(who.name, who.role, who.scope).key).json()["key"]


# -- ways round


@pytest.mark.both_databases
def test_nothing_of_another_project_shines_through(here: World, callers: dict[str, Caller]) -> None:
    key, lab, rivals = callers["member"].key, here.lab, here.rivals
    missing = "file-01" + "0" * 24  # one of zeros alone stands for a file that is not sent yet

    def ask(method: str, path: str, **more: Any) -> httpx.Response:
        return here.ask(method, path, key, **more)

    def same(one: httpx.Response, other: httpx.Response, *ids: str) -> None:
        texts = [re.sub(r'"request_id":"[^"]*"', "", reply.text) for reply in (one, other)]
        for number in ids:
            texts = [text.replace(number, "ID") for text in texts]
        assert (one.status_code, texts[0]) == (other.status_code, texts[1])
        assert one.status_code >= 400

    # files inside specs, wherever they stand
    for data in (
        "ID",
        {"train": lab.file, "eval": "ID"},
        {"train": {"type": "mixture", "sources": [{"source": {"type": "file", "id": "ID"}, "weight": 1}]}},
    ):
        for path in ("/jobs", "/jobs?dry_run=true"):
            replies = [
                ask("POST", path, json={"model": MODEL, "data": json.loads(json.dumps(data).replace("ID", number))})
                for number in (rivals.file, missing)
            ]
            same(*replies, rivals.file, missing)
            assert replies[0].status_code == 422
    # a job whose model is somebody else's job
    for path in ("/jobs", "/jobs?dry_run=true"):
        numbers = (rivals.job, "job-01" + "0" * 24)
        replies = [ask("POST", path, json={"model": number, "data": lab.file}) for number in numbers]
        same(*replies, *numbers)
        assert replies[0].status_code == 404
    # a preview of one's own file that is somebody else's, and of somebody else's file
    same(
        ask("GET", f"/files/{lab.file}/previews/{rivals.preview}"),
        ask("GET", f"/files/{lab.file}/previews/preview-{'0' * 26}"),
        rivals.preview,
        f"preview-{'0' * 26}",
    )
    # jobs' and files' artifacts and models on the data root, by path
    folder = here.layout.artifacts(rivals.job, 2)
    assert folder.is_dir()
    for path in (folder, here.layout.file(rivals.file), here.layout.root / "nothing"):
        words = [
            ask("POST", "/jobs?dry_run=true", json=spec).json()["error"]["faults"][0]["code"]
            for spec in (
                {"model": str(path), "data": lab.file},
                {"model": {"type": "gguf", "path": f"{path}.gguf"}, "data": lab.file},
                {"model": MODEL, "data": {"train": {"type": "path", "path": str(path), "format": "text"}}},
            )
        ]
        assert words == ["path_not_allowed"] * 3, path
    for path in (f"../../../{rivals.job}/attempt-2/artifacts/a.bin", "..%2f..%2fattempt-1%2flog.txt"):
        assert ask("GET", f"/jobs/{lab.job}/artifacts/{path}").status_code == 404
    # lists, their filters and cursors
    for path in ("", "&name=same%20name", "&status=succeeded", "&created_after=2020-01-01"):
        shown = {job["id"] for job in ask("GET", f"/jobs?limit=200{path}").json()["data"]}
        assert lab.job in shown and rivals.job not in shown, path
    shown = {file["id"] for file in ask("GET", f"/files?sha256={SHA}&limit=200").json()["data"]}
    assert lab.file in shown and rivals.file not in shown
    for path, theirs, none in (
        ("/jobs", rivals.job, f"job-{'0' * 26}"),
        ("/files", rivals.file, missing),
        ("/keys", rivals.key, f"key-{'0' * 26}"),
    ):
        same(ask("GET", f"{path}?after={theirs}"), ask("GET", f"{path}?after={none}"))
    # models that are asked for answers
    admin = here.caller("admin of lab and box", Role.ADMIN, Scope.BOX, box_admin=True).key
    for who in (key, admin):
        for name in (rivals.model, rivals.job, f"{rivals.job}@base"):
            body = {"messages": [{"role": "user", "content": "turn on the light"}], "model": name}
            reply = here.ask("POST", "/v1/chat/completions", who, json=body)
            assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found", reply.text
            assert here.ask("GET", f"/v1/models/{name}", who).status_code == 404
        served = {one["id"] for one in here.ask("GET", "/v1/models", who).json()["data"]}
        assert rivals.model not in served
    # streams
    for headers in ({}, {"last-event-id": "1"}, {"accept": "application/json"}):
        same(
            ask("GET", f"/jobs/{rivals.job}/events", headers=headers),
            ask("GET", f"/jobs/job-{'0' * 26}/events", headers=headers),
            rivals.job,
            f"job-{'0' * 26}",
        )
    # one Idempotency-Key in two projects is two
    stranger = here.caller("stranger", Role.MEMBER, Scope.WRITE, project=rivals.id).key
    headers = {"idempotency-key": here.fresh("idem")}
    mine = ask("POST", "/jobs", json={"model": MODEL, "data": lab.file}, headers=headers)
    other = here.ask("POST", "/jobs", stranger, json={"model": MODEL, "data": rivals.file}, headers=headers)
    assert (mine.status_code, other.status_code) == (201, 201), (mine.text, other.text)
    assert mine.json()["id"] != other.json()["id"]
    # people and projects
    assert [project["name"] for project in ask("GET", "/projects").json()["data"]] == ["lab"]
    members = {one["user"]["name"] for one in ask("GET", f"/projects/{lab.id}/members").json()["data"]}
    assert "member" in members and "owner of rivals" not in members
    same(ask("GET", "/keys?project=rivals"), ask("GET", "/keys?project=nobodys"), "rivals", "nobodys")
    body = {"name": "x", "project": "rivals"}
    same(ask("POST", "/keys", json=body), ask("POST", "/keys", json=body | {"project": "nobodys"}), "rivals", "nobodys")


def test_no_key_is_ever_written_down(here: World, callers: dict[str, Caller]) -> None:
    """Neither in the log at its most talkative, nor in an error, nor in the audit."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        boss = callers["boss"].key
        made = here.ask("POST", "/keys", boss, json={"name": "new"}).json()
        here.secrets.append(made["key"])
        rotated = here.ask("POST", f"/keys/{made['id']}/rotate", boss).json()
        here.secrets.append(rotated["key"])
        replies = [here.ask("DELETE", f"/keys/{rotated['id']}", boss), here.ask("GET", "/jobs", rotated["key"])]
        replies += [here.ask("POST", "/jobs", who.key, json={"model": who.key}) for who in callers.values()]
        replies += [here.ask("GET", "/audit?limit=200", boss), here.ask("GET", "/keys?all=true&limit=200", boss)]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert re.search(r"POST /keys 201 \d+ ms by user-\w{26} with key-\w{26}\n", stream.getvalue()), "it says who"
    with here.database.read() as session:
        audit = json.dumps([[row.target, row.data] for row in session.execute(select(Audit)).scalars()])
    written = stream.getvalue() + audit + "".join(reply.text for reply in replies)
    for secret in here.secrets:
        assert secret not in written and secret.rpartition("_")[2] not in written


def test_routes_of_tinker_ask_for_a_key_too(here: World, callers: dict[str, Caller]) -> None:
    """Their errors have a `detail`, and the key may come with `tml-` before it, or alone."""
    viewer = next(one for one in callers.values() if one.role is Role.VIEWER and not one.box_admin)
    things = {"session_id": "0" * 32, "sampler_id": f"session-{'0' * 26}"}
    things |= {"run_id": f"{'0' * 32}:train:0", "kind": "weights", "label": "x"}
    policies = {route: policy for route, policy in here.app.state.policies.items() if route[1].startswith(TINKER)}
    assert len(policies) >= 18
    for (method, path), policy in policies.items():
        url = path.format(**things)
        assert policy.scope is not None, path
        assert here.ask(method, url, None).status_code == 401, path
        wrong = here.ask(method, url, None, headers={"x-api-key": "tml-eft_wrong"})
        assert wrong.status_code == 401 and wrong.json()["detail"], path
        if policy.scope is Scope.WRITE:
            for key in (viewer.key, f"tml-{viewer.key}"):
                assert here.ask(method, url, None, headers={"x-api-key": key}).status_code == 403, path
