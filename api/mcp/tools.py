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
    Operation("pause_job", "POST", "/jobs/{job_id}/pause"),
    Operation("resume_job", "POST", "/jobs/{job_id}/resume"),
    Operation("cancel_job", "POST", "/jobs/{job_id}/cancel"),
    Operation("retry_job", "POST", "/jobs/{job_id}/retry"),
    Operation("list_files", "GET", "/files"),
    Operation("show_file", "GET", "/files/{file_id}"),
    UPLOAD,
    Operation("show_queue", "GET", "/queue"),
    Operation("list_gpus", "GET", "/gpus"),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


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
    if tool.method == "POST" and tool is not PLAN:
        words = "A retry with the same key and the same arguments does nothing a second time."
        properties["idempotency_key"] = {"type": "string", "maxLength": 255, "description": words}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


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
        cut |= {"type": "object", "title": " | ".join(name_of(each["$ref"]) for each in schema["oneOf"])}
    if "anyOf" in schema:
        cut["anyOf"] = [shallow(each) for each in schema["anyOf"]]
    if isinstance(schema.get("items"), Mapping):
        cut["items"] = shallow(schema["items"])
    return cut


def name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _resolved(schema: Mapping[str, Any], document: Document) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][name_of(schema["$ref"])]
    for arm in schema.get("anyOf", ()):
        if arm.get("type") != "null":
            return _resolved(arm, document)
    return schema
