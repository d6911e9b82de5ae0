"""The page of a new job: a short form and the job file that is sent, with faults and plan by dry run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.auth.policy import Reading
from api.deps import App, AppState, authorise
from api.files.router import list_files
from api.jobs.router import show_job
from api.web import render
from api.web.views import Views
from core import HOME
from core.errors import NotFound
from core.jobs.views import handles
from core.spec.job import JobSpec

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
RECIPES = HOME / "examples" / "recipes"
FILES = 200
"""Newest files that the form offers."""


@router.get("/ui/new")
def new_page(
    request: Request,
    principal: Reading,
    app: App,
    clone: Annotated[str, Query(max_length=300, pattern=r"^[^\x00]*$")] = "",
    file: Annotated[str, Query(max_length=300, pattern=r"^[^\x00]*$")] = "",
    recipe: Annotated[str, Query(max_length=100, pattern=r"^[^\x00]*$")] = "",
) -> Response:
    """A form over the job spec; with `clone` the file of that job, with `recipe` one of the examples over `file`."""
    views = Views(request, principal)
    text, origin = "", None
    if clone:
        origin = views.ask(show_job, job_id=_job_id(app, principal, clone))
        spec = dict(origin["spec"])
        spec.pop("version", None)
        text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
    elif recipe:
        if recipe not in recipes():
            raise NotFound(f"there is no recipe `{recipe}`; there are {', '.join(recipes())}", field="recipe")
        text = _over(recipes()[recipe], file)
    return render.page(
        request,
        "new.html",
        text=text,
        recipe=recipe,
        recipes=list(recipes()),
        origin=origin,
        files=views.ask(list_files, sha256=None, limit=FILES, after=None)["data"],
        chosen=file,
        fields=spec_fields(),
        axes={name: axis(name) for name in ("stage", "method")},
    )


def _job_id(app: AppState, principal: Reading, handle: str) -> str:
    if handles.JOB.is_id(handle):
        return handle
    with app.database.read() as session:
        return handles.resolve(session, principal, handles.JOB, handle)


@cache
def recipes() -> dict[str, str]:
    """Job files of the examples by their names; none where the service runs without them."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(RECIPES.glob("*.yaml"))}


def _over(text: str, file: str) -> str:
    """A recipe over an uploaded file in place of its own, which lie on the author's disk. One that trains on a task has
    none, and stays as it is."""
    text = re.sub(r"^( +)(eval: *[^\s#].*)$", r"\1# \2", text, flags=re.MULTILINE)
    if not file:
        return text
    text = re.sub(r"type: path(,|\n) *path: [\w./-]+", lambda found: f"type: file{found[1]} id: {file}", text)
    return re.sub(r"^( *[\w-][^#\n]*?)[\w./-]+\.jsonl", lambda found: found[1] + file, text, flags=re.MULTILINE)


@cache
def axis(name: str) -> list[str]:
    """The short forms of a field of the job spec as the schema has them, the default first."""
    given = JobSpec.model_json_schema()["properties"][name]
    (arms,) = (choice["enum"] for choice in given["anyOf"] if "enum" in choice)
    return sorted(arms, key=lambda arm: (arm != given["default"]["type"], arm))


@cache
def spec_fields() -> list[dict[str, str]]:
    """Every field of the job spec as the schema has it: dotted path, type, default and description."""
    schema = JobSpec.model_json_schema()
    found: dict[str, dict[str, str]] = {}
    for path, given in _walk(schema, schema.get("$defs", {}), "", ()):
        found.setdefault(path, {"path": path, "kind": _kind(given), "words": _first(given), "default": _default(given)})
    return list(found.values())


def _walk(
    schema: Mapping[str, Any], parts: Mapping[str, Any], path: str, seen: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from _walk(parts[name], parts, path, (*seen, name))
        return
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if name != "type":
            yield here, inner
        yield from _walk(inner, parts, here, seen)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _walk(choice, parts, path, seen)


def _kind(given: Mapping[str, Any]) -> str:
    if "enum" in given:
        return " | ".join(map(str, given["enum"]))
    kinds = [str(one["type"]) for one in given.get("anyOf", ()) if "type" in one]
    return str(given.get("type") or " | ".join(kinds) or "object")


def _first(given: Mapping[str, Any]) -> str:
    return " ".join(str(given.get("description", "")).split("\n\n")[0].split())


def _default(given: Mapping[str, Any]) -> str:
    value = given.get("default")
    return "" if value is None or isinstance(value, dict | list) else str(value)
