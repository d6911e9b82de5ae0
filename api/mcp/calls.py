"""What a tool does with its arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from api.mcp.caller import Caller, Reply
from api.mcp.tools import (
    ACTION,
    BY_NAME,
    PLAN,
    SHOW,
    SUBMIT,
    UPLOAD,
    Document,
    Operation,
    ToolOfActions,
    parameters_of,
    schema_of,
    shallow_object,
)
from core.spec.differences import differences

COMPARED = 8
"""Jobs of one comparison."""


class Mistake(Exception):
    """An argument is wrong, or what was asked for must not happen; the text says what to do."""


async def call(name: str, arguments: Mapping[str, Any], caller: Caller, document: Document) -> Reply:
    """Raises Mistake."""
    match name:
        case "describe":
            return Reply(200, _describe(arguments, document))
        case "compare_jobs":
            return await _compare(arguments, caller)
    operation = BY_NAME.get(name)
    if isinstance(operation, ToolOfActions):
        action, arguments = arguments.get(ACTION), {key: value for key, value in arguments.items() if key != ACTION}
        if not isinstance(action, str) or action not in operation.routes:
            raise Mistake(f"`{ACTION}` of {name} is one of {', '.join(operation.routes)}")
        operation = operation.routes[action]
        name = operation.name
    if operation is None:
        raise Mistake(f"there is no tool `{name}`; there are {', '.join([*BY_NAME, 'describe', 'compare_jobs'])}")
    known = schema_of(operation, document)
    for argument in arguments:
        if argument not in known["properties"]:
            raise Mistake(f"{name} has no argument `{argument}`; it has {', '.join(known['properties']) or 'none'}")
    for argument in known.get("required", ()):
        if argument not in arguments:
            raise Mistake(f"{name} needs the argument `{argument}`")
    if operation is PLAN:
        return await _plan(arguments, caller)
    if operation is SUBMIT:
        return await _submit(arguments, caller)
    if operation is UPLOAD:
        return await _upload(arguments, caller, document)
    return await _request(operation, arguments, caller, document)


async def _request(operation: Operation, arguments: Mapping[str, Any], caller: Caller, document: Document) -> Reply:
    rest = dict(arguments)
    key = rest.pop("idempotency_key", None)
    path = operation.path
    for name in parameters_of(operation, document, "path"):
        value = rest.pop(name)
        if not isinstance(value, str) or not value:
            raise Mistake(f"`{name}` is text: an id, or a name")
        path = path.replace("{" + name + "}", quote(value, safe=""))
    query = {name: rest.pop(name, operation.usual.get(name)) for name in parameters_of(operation, document, "query")}
    headers = {} if key is None else {"idempotency-key": _text("idempotency_key", key)}
    for name, value in query.items():
        query[name] = _plain(name, value)
    asked = {**query, **operation.fixed}
    return await caller(operation.method, path, query=asked, value=rest or None, headers=headers)


async def _plan(arguments: Mapping[str, Any], caller: Caller) -> Reply:
    reply = await caller("POST", "/jobs", query=PLAN.fixed, value=arguments["job"])
    return reply if reply.failed else Reply(reply.status, {"plan": plan_id(reply.body), **_renamed(reply.body)})


async def _submit(arguments: Mapping[str, Any], caller: Caller) -> Reply:
    """The job, when a plan of it, made now, is still the one that the caller has seen."""
    planned = await caller("POST", "/jobs", query=PLAN.fixed, value=arguments["job"])
    if planned.failed:
        return planned
    if arguments["plan"] != plan_id(planned.body):
        raise Mistake("`plan` is not the plan of this job on this box as it is now: call plan_job, and look at it")
    key = arguments.get("idempotency_key")
    headers = {} if key is None else {"idempotency-key": _text("idempotency_key", key)}
    return await caller("POST", "/jobs", value=arguments["job"], headers=headers)


def plan_id(dry_run: Mapping[str, Any]) -> str:
    """An id of what a dry run answered: the job with its defaults, and where it fits with how much memory."""
    places = (dry_run["plan"] or {}).get("places", ())
    about = [
        dry_run["spec"],
        [[place["kind"], place["arch"], place["fits"], place["peak_bytes"], place["method"]] for place in places],
    ]
    return "plan-" + hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _renamed(dry_run: Mapping[str, Any]) -> dict[str, Any]:
    return {("memory" if name == "plan" else name): value for name, value in dry_run.items()}


async def _upload(arguments: Mapping[str, Any], caller: Caller, document: Document) -> Reply:
    rest = {name: _text(name, value) for name, value in arguments.items()}
    rows, key = rest.pop("rows"), rest.pop("idempotency_key", None)
    headers = {"content-type": "application/octet-stream"} | ({} if key is None else {"idempotency-key": key})
    query = {"filename": "rows.jsonl", **rest}
    try:
        content = rows.encode()
    except UnicodeEncodeError as error:
        raise Mistake(f"`rows` is not text: {error.reason}") from error
    return await caller("POST", "/files", query=query, content=content, headers=headers)


async def _compare(arguments: Mapping[str, Any], caller: Caller) -> Reply:
    """Only the fields in which the jobs differ, and the result of each."""
    jobs = arguments.get("jobs")
    if not isinstance(jobs, list) or not 2 <= len(jobs) <= COMPARED or not all(isinstance(each, str) for each in jobs):
        raise Mistake(f"`jobs` is a list of 2 to {COMPARED} ids or names")
    views = []
    for job in jobs:
        reply = await caller("GET", SHOW.path.replace("{job_id}", quote(job, safe="")))
        if reply.failed:
            return reply
        views.append(reply.body)
    shown = ("id", "name", "status", "progress", "result")
    differ = differences([view["spec"] for view in views])
    return Reply(200, {"jobs": [{name: view.get(name) for name in shown} for view in views], "differ": differ})


def _describe(arguments: Mapping[str, Any], document: Document) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    name = arguments.get("schema", "JobSpec")
    if not isinstance(name, str) or name not in schemas:
        raise Mistake(f"there is no schema `{name}`; there are {', '.join(sorted(schemas))}")
    about = schemas[name]
    return shallow_object(about) if "properties" in about else dict(about)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Mistake(f"`{name}` is text")
    return value


def _plain(name: str, value: Any) -> Any:
    """A value of a query parameter."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    if value is None or isinstance(value, str | int | float | bool):
        return str(value).lower() if isinstance(value, bool) else value
    raise Mistake(f"`{name}` is one value, or a list of texts")
