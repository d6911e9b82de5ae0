"""The tools of the MCP endpoint: a table of this API's own operations, and the JSON schemas of their arguments.

A tool is called by sending its operation to the API with the key of whoever asked, so that policies, limits, checks
and the audit are those of the route. Its schema is made from the route's: path and query parameters, and the fields of
a JSON body. Large schemas are cut at their first level; the tool `describe` shows what is below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api.auth.policy import Policy

MOST = 20
"""Tools; a model chooses worse among more."""
Document = Mapping[str, Any]
"""An OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A tool that is one request."""

    name: str
    method: str
    path: str
    hidden: tuple[str, ...] = ()
    """Query parameters that the tool does not offer."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Query parameters that it always sends."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from the route's: an answer has to fit into a model's context."""
    unkeyed: bool = False
    """The route knows a retry by the body alone."""


@dataclass(frozen=True, slots=True)
class ToolOfActions:
    """A tool that is one of several requests, as its argument `action` says."""

    name: str
    words: str
    routes: Mapping[str, Operation]
    """By their actions."""


PLAN = Operation("plan_job", "POST", "/jobs", fixed={"dry_run": "true"})
SUBMIT = Operation("submit_job", "POST", "/jobs", hidden=("dry_run",))
SHOW = Operation("show_job", "GET", "/jobs/{job_id}")
UPLOAD = Operation("upload_rows", "POST", "/files")

OPERATIONS = (
    PLAN,
    SUBMIT,
    Operation("list_jobs", "GET", "/jobs"),
    SHOW,
    Operation("watch_job", "GET", "/jobs/{job_id}/events", hidden=("format",), fixed={"format": "json"}),
    Operation("job_metrics", "GET", "/jobs/{job_id}/metrics", hidden=("format",), usual={"points": 50}),
    Operation("job_log", "GET", "/jobs/{job_id}/logs", hidden=("offset",), usual={"tail": 100}),
    Operation("job_samples", "GET", "/jobs/{job_id}/samples"),
    Operation("job_rollouts", "GET", "/jobs/{job_id}/rollouts", usual={"limit": 20}),
    Operation("list_files", "GET", "/files"),
    Operation("show_file", "GET", "/files/{file_id}"),
    UPLOAD,
    Operation("show_queue", "GET", "/queue"),
    Operation("list_gpus", "GET", "/gpus"),
    Operation("open_session", "POST", "/sessions"),
    Operation("session_verb", "POST", "/sessions/{session_id}/operations", unkeyed=True, usual={"wait": 30}),
)
CHOICES = (
    ToolOfActions(
        "change_job",
        "Change what becomes of a job.",
        {
            action: Operation(f"change_job {action}", "POST", f"/jobs/{{job_id}}/{action}")
            for action in ("pause", "resume", "cancel", "retry")
        },
    ),
    ToolOfActions(
        "manage_sessions",
        "Find sessions, park them and close them.",
        {
            "list": Operation("manage_sessions list", "GET", "/sessions"),
            "show": Operation("manage_sessions show", "GET", "/sessions/{session_id}"),
            "park": Operation("manage_sessions park", "POST", "/sessions/{session_id}/park"),
            "close": Operation("manage_sessions close", "POST", "/sessions/{session_id}/close"),
        },
    ),
)
ACTION = "action"
BY_NAME: Mapping[str, Operation | ToolOfActions] = {each.name: each for each in (*OPERATIONS, *CHOICES)}


def operation_of(tool: Operation, document: Document) -> Mapping[str, Any]:
    """What OpenAPI says of a tool's route."""
    found: Mapping[str, Any] = document["paths"][tool.path][tool.method.lower()]
    return found


def policy_of(tool: Operation, document: Document) -> Policy:
    return Policy.of(operation_of(tool, document)["x-eft-policy"])


def words_of(tool: Operation, document: Document) -> str:
    """The route's summary and description."""
    operation = operation_of(tool, document)
    return f"{operation['summary']}. {operation.get('description', '')}".strip()


def parameters_of(tool: Operation, document: Document, place: str) -> dict[str, Mapping[str, Any]]:
    """The parameters that a caller may give, by name. `place`: `path` or `query`."""
    return {
        parameter["name"]: parameter
        for parameter in operation_of(tool, document).get("parameters", ())
        if parameter["in"] == place and parameter["name"] not in (*tool.hidden, *tool.fixed)
    }


def schema_of(tool: Operation, document: Document) -> dict[str, Any]:
    """The JSON schema of a tool's arguments. The fields of a JSON body are arguments like all others, except for a job,
    which is the argument `job`."""
    properties: dict[str, Any] = {}
    required = []
    for place in ("path", "query"):
        for name, parameter in parameters_of(tool, document, place).items():
            about = shallow(parameter["schema"])
            if "description" in parameter:
                about["description"] = parameter["description"]
            if name in tool.usual:
                about["default"] = tool.usual[name]
            properties[name] = about
            if parameter.get("required"):
                required.append(name)
    content = operation_of(tool, document).get("requestBody", {}).get("content", {})
    if tool is PLAN:
        properties["job"] = shallow_object(document["components"]["schemas"]["JobSpec"])
        required.append("job")
    elif tool is SUBMIT:
        properties["job"] = {"type": "object", "description": "The job that plan_job was asked about."}
        required.append("job")
    elif "application/json" in content and tool is not UPLOAD:
        body = shallow_object(_resolved(content["application/json"]["schema"], document))
        properties |= body["properties"]
        required += body.get("required", [])
    if tool is SUBMIT:
        words = "The `plan` that plan_job answered for this job; another job, or a box that has changed, needs another."
        properties["plan"] = {"type": "string", "description": words}
        required.append("plan")
    if tool is UPLOAD:
        properties["rows"] = {"type": "string", "description": "The rows, as JSON Lines or CSV; at most 3 MB."}
        properties["columns"] = {"type": "string", "description": properties["columns"].get("description", "")}
        required.append("rows")
    if tool.method == "POST" and tool is not PLAN and not tool.unkeyed:
        words = "A retry with the same key and the same arguments does nothing a second time."
        properties["idempotency_key"] = {"type": "string", "maxLength": 255, "description": words}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def schema_of_choice(tool: ToolOfActions, document: Document) -> dict[str, Any]:
    """The JSON schema of the arguments: the action, and whatever any of the routes takes. Only what all of them need is
    required; what one of them lacks, its call says."""
    words = "; ".join(f"`{action}`: {operation_of(each, document)['summary']}" for action, each in tool.routes.items())
    properties: dict[str, Any] = {ACTION: {"type": "string", "enum": [*tool.routes], "description": f"{words}."}}
    schemas = [schema_of(each, document) for each in tool.routes.values()]
    for schema in reversed(schemas):
        properties |= schema["properties"]
    always = [
        name for name in schemas[0].get("required", ()) if all(name in one.get("required", ()) for one in schemas)
    ]
    return {"type": "object", "properties": properties, "required": [ACTION, *always], "additionalProperties": False}


def shallow_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An object's schema whose fields are cut."""
    about = ("type", "description", "required", "additionalProperties")
    kept = {name: schema[name] for name in about if name in schema}
    return kept | {"properties": {name: shallow(about) for name, about in schema.get("properties", {}).items()}}


def shallow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A field's schema in which every reference is an object of any fields with the name that `describe` knows."""
    if "$ref" in schema:
        return {"type": "object", "title": name_of(schema["$ref"])}
    cut: dict[str, Any] = {
        name: value for name, value in schema.items() if name not in ("discriminator", "oneOf", "anyOf", "items")
    }
    if "oneOf" in schema:
        cut |= {"type": "object", "title": " | ".join(_title(each) for each in schema["oneOf"])}
    if "anyOf" in schema:
        cut["anyOf"] = [shallow(each) for each in schema["anyOf"]]
    if isinstance(schema.get("items"), Mapping):
        cut["items"] = shallow(schema["items"])
    return cut


def name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _title(schema: Mapping[str, Any]) -> str:
    """The name of an arm, which stands in its place in the schemas of bodies."""
    return name_of(schema["$ref"]) if "$ref" in schema else str(schema.get("title", "object"))


def _resolved(schema: Mapping[str, Any], document: Document) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][name_of(schema["$ref"])]
    for arm in schema.get("anyOf", ()):
        if arm.get("type") != "null":
            return _resolved(arm, document)
    return schema
