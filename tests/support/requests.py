"""A request that would be good for every route of the application, made of a world (tests/support/world.py)."""

from __future__ import annotations

import re
from typing import Any

from tests.support.uploads import adapter_files
from tests.support.world import MODEL, Project, World, rewarded


def objects(here: World, project: Project | None, *, fresh: bool) -> dict[str, str]:
    """What stands in paths: things of a project, or (None) of nobody."""
    nothing = "0" * 26
    if project is None:
        return {
            "job_id": f"job-{nothing}",
            "file_id": f"file-{nothing}",
            "preview_id": f"preview-{nothing}",
            "trial_id": f"trial-{nothing}",
            "pipeline_id": f"pipe-{nothing}",
            "sweep_id": f"sweep-{nothing}",
            "model_id": f"model-{nothing}",
            "export_id": f"export-{nothing}",
            "checkpoint_id": "step-00000010@2",
            "session_id": f"session-{nothing}",
            "position": "1",
            "key_id": f"key-{nothing}",
            "webhook_id": f"hook-{nothing}",
            "delivery_id": f"msg-{nothing}",
            "path": "adapter/a.safetensors",
            "project": f"proj-{nothing}",
            "user": f"user-{nothing}",
            "name": "nowhere",
        }
    webhook, delivery = here.webhook(project, fresh=fresh)
    return {
        "job_id": project.job,
        "file_id": here.file(project.owner) if fresh else project.file,
        "preview_id": project.preview,
        "trial_id": project.trial,
        "pipeline_id": project.pipeline,
        "sweep_id": project.sweep,
        "model_id": project.model,
        "export_id": here.export(project),
        "checkpoint_id": here.checkpoint(project.job),
        "session_id": here.session(project, fresh=fresh),
        "position": "1",
        "key_id": here.key_of(project) if fresh else project.key,
        "webhook_id": webhook,
        "delivery_id": delivery,
        "path": "adapter/a.safetensors",
        "project": project.id,
        "user": here.member(project) if fresh else project.owner.user_id,
        "name": "box",
    }


OF_ANOTHER_PROTOCOL = {"/mcp", "/sessions/{session_id}/operations", "/v1/chat/completions", "/v1/completions"}
"""Paths whose bodies have the shape of another protocol (tests/service/test_mcp.py), or a number of their own by which
they are known again (tests/service/test_sessions.py)."""


def filled(path: str, things: dict[str, str]) -> str:
    unknown = sorted(set(re.findall(r"{(\w+)}", path)) - set(things))
    assert not unknown, f"{path}: say in `objects` (and BOX_LEVEL) what {unknown} is, of a project and of nobody"
    return path.format(**things)


def request_of(here: World, route: tuple[str, str], project: Project) -> dict[str, Any]:
    """A request that would be good: the example of the document, or what stands here."""
    method, path = route
    match route:
        case ("POST", "/jobs"):
            return {"json": {"model": MODEL, "data": project.file}}
        case ("POST", "/pipelines"):
            return {"json": {"steps": [{"name": "only", "job": {"model": MODEL, "data": project.file}}]}}
        case ("POST", "/sweeps"):
            return {"json": {"model": MODEL, "data": project.file, "sweep": {"training.seed": [1, 2]}}}
        case ("POST", "/pipelines/{pipeline_id}/retry"):
            return {"json": {"from": "only"}}
        case ("POST", "/v1/chat/completions") | ("POST", "/v1/completions"):
            return {"json": {"model": project.model}}  # without a prompt, since no worker answers here
        case ("POST", "/sessions"):
            return {"json": {"model": MODEL}}
        case ("POST", "/models"):
            return {"files": [("file", one) for one in adapter_files()], "data": {"base": MODEL}}
        case ("POST", "/files"):
            return {"files": {"file": ("rows.jsonl", b'{"text": "a"}\n')}}
        case ("POST", "/files/{file_id}/preview"):
            return {"json": {"model": MODEL}}
        case ("POST", "/rewards/try"):
            return {"json": rewarded(project.file)}
        case ("POST", "/keys"):
            return {"json": {"name": here.fresh("key")}}
        case ("POST", "/limits"):
            return {"json": {"scope": "project", "name": "lab", "max_running": 1000}}
        case ("POST", "/maintenance"):
            return {"json": {"from": "2099-12-30T08:00:00Z", "until": "2099-12-30T10:00:00Z", "node": "box"}}
        case ("POST", "/maintenance/cancel"):
            return {"json": {"id": here.maintenance()}}
        case ("POST", "/webhooks"):
            return {"json": {"url": "https://9.9.9.9/"}}  # an address: nobody is asked for a name
        case ("POST", "/users") | ("POST", "/projects"):
            return {"json": {"name": here.fresh("name")}}
    operation = here.app.openapi()["paths"][path]["get" if method == "HEAD" else method.lower()]
    if "requestBody" not in operation:
        return {}
    return {"json": operation["requestBody"]["content"]["application/json"]["example"]}
