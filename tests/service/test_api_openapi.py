"""The OpenAPI document: complete, true, and with the short forms in it."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from api.app import ROUTERS, create_app
from api.deps import query_parameters
from api.jobs.schemas import SPEC_LONG, SPEC_SHORT, SPEC_YAML
from core.jobs.policies import nodes
from core.settings import Settings
from core.spec.load import load_yaml, parse_job


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    return create_app(Settings(data=folder)).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def test_every_route_says_what_it_does(document: dict[str, Any]) -> None:
    assert len(operations(document)) >= 18
    for name, operation in operations(document):
        assert operation["summary"], name
        assert len(operation["description"]) > 20, name
        (tag,) = operation["tags"]
        assert tag in (
            "jobs",
            "files",
            "nodes",
            "queue",
            "webhooks",
            "access",
            "service",
            "pipelines",
            "sweeps",
            "sessions",
            "serving",
            "models",
        ), name
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (name, parameter["name"])


def test_every_success_and_every_body_has_an_example(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        good = [reply for status, reply in operation["responses"].items() if status in ("200", "201")]
        assert good, name
        for content in [c for reply in good for c in reply["content"].values()]:
            schema = resolve(document, content.get("schema", {}))
            assert "example" in content or "examples" in content or schema.get("examples"), name
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in content or "examples" in content, name


def test_errors_are_declared_in_their_one_shape(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for status, reply in operation["responses"].items():
            if status.startswith(("4", "5")) and operation["tags"] != ["service"]:
                reference = reply["content"]["application/json"]["schema"]["$ref"]
                assert reference == "#/components/schemas/ErrorBody", (name, status)
        if operation["tags"] != ["service"]:
            assert operation["security"] == [{"HTTPBearer": []}], name
            assert "401" in operation["responses"], name
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    found = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                found.add(node["$ref"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    mapping = {
        target
        for schema in document["components"]["schemas"].values()
        for field in schema.get("properties", {}).values()
        for option in [field, *field.get("anyOf", [])]
        for target in option.get("discriminator", {}).get("mapping", {}).values()
    }
    assert found | mapping <= known
    assert "#/components/schemas/JobSpec" in found


def test_the_job_spec_shows_its_short_forms(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["JobSpec"]["properties"]
    assert fields["method"]["anyOf"][0]["enum"] == ["auto", "full", "lora", "oft", "qlora"]
    for axis in ("method", "schedule", "stage"):
        short, whole = fields[axis]["anyOf"]
        assert short["type"] == "string"
        assert short["enum"] == sorted(whole["discriminator"]["mapping"]), "every arm has one"
    for axis in ("model", "data"):
        assert fields[axis]["anyOf"][0]["type"] == "string"
        assert fields[axis]["anyOf"][0]["examples"]


def test_the_examples_are_jobs() -> None:
    assert parse_job(SPEC_SHORT).method.type == "lora"
    assert parse_job(SPEC_LONG).optimizer.learning_rate == 1e-4
    assert parse_job(load_yaml(SPEC_YAML.encode())).optimizer.learning_rate == 1e-4


def test_it_is_served(api: Any, document: dict[str, Any]) -> None:
    assert api.http.get("/openapi.json").json() == document
    page = api.http.get("/docs")
    for name, operation in operations(document):
        method, path = name.split(" ")
        assert f"<code>{method} {path}</code> {escape(operation['summary'])}" in page.text
    # A box without a way out shows it too: nothing is fetched, and nothing may be.
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|openapi\.json)|<script|@import|url\(", page.text)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_replies_keep_to_the_document(api: Any, document: dict[str, Any]) -> None:
    """Replies are made by hand for speed; here they are held to the models that the document is made of."""
    from api.auth.schemas import (
        AuditPage,
        KeyPage,
        KeyView,
        Me,
        MemberList,
        MemberRemoved,
        MemberView,
        NewKeyView,
        ProjectList,
        ProjectView,
        RevokedKeyView,
        UserList,
        UserView,
    )
    from api.events.router import EventPage
    from api.files.schemas import FilePage, FileView
    from api.health import Readiness, Version
    from api.jobs.schemas import ArtifactList, DryRun, JobPage, JobView
    from api.nodes.schemas import NodeList, NodeView

    http = api.http
    file = api.upload(b'{"text": "a"}\n')
    job = api.submit(data=file["id"])
    with api.database.write() as session:
        nodes.register(session, "shown", "worker-x", "0.1.0", [{"id": "cpu", "kind": "cpu"}], [])
    user = http.post("/users", json={"name": "shown"}).json()
    key = http.post("/keys", json={"expires_in_days": 1}).json()
    member = "/projects/lab/members/shown"
    checked = {
        Me: http.get("/me").json(),
        UserView: user,
        UserList: http.get("/users").json(),
        ProjectView: http.post("/projects", json={"name": "shown"}).json(),
        ProjectList: http.get("/projects").json(),
        MemberView: http.put(member, json={"role": "viewer"}).json(),
        MemberList: http.get("/projects/lab/members").json(),
        MemberRemoved: http.delete(member).json(),
        NewKeyView: key,
        KeyView: http.get("/keys").json()["data"][0],
        RevokedKeyView: http.delete(f"/keys/{key['id']}").json(),
        KeyPage: http.get("/keys").json(),
        AuditPage: http.get("/audit").json(),
        NodeList: http.get("/nodes").json(),
        NodeView: http.post("/nodes/shown/drain").json(),
        FileView: file,
        JobView: job,
        JobPage: http.get("/jobs").json(),
        FilePage: http.get("/files").json(),
        EventPage: http.get(job["links"]["events"], params={"format": "json"}).json(),
        ArtifactList: http.get(job["links"]["artifacts"]).json(),
        DryRun: http.post("/jobs?dry_run=true", json={"model": "a/b", "data": file["id"]}).json(),
        Readiness: http.get("/readyz").json(),
        Version: http.get("/version").json(),
    }
    for model, reply in checked.items():
        assert model.model_validate(reply, extra="forbid").model_dump() == reply, model


def test_what_is_answered_is_documented(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert set(paths["/usage"]["get"]["responses"]["200"]["content"]) == {"application/json", "text/csv"}
    assert "400" in paths["/webhooks/{webhook_id}/deliveries"]["get"]["responses"]
    for path in ("/healthz", "/readyz", "/version"):
        assert "429" in paths[path]["get"]["responses"], path


def test_the_parameters_that_a_route_takes_are_those_of_the_document(document: dict[str, Any]) -> None:
    seen = 0
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    for route in (route for route in routes if route.include_in_schema):
        for method in sorted(route.methods or ()):
            operation = document["paths"][route.path_format][method.lower()]
            told = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
            assert query_parameters(route) == told, f"{method} {route.path}"
            seen += len(told)
    assert seen > 50
