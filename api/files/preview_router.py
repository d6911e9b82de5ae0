"""`/files/{id}/preview`: what training would make of a file, as a task without a GPU."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy.orm import Session

from api.auth.policy import Reading, Writing
from api.deps import App, AppState
from api.errors import printable
from api.handles import FileId
from api.http.body import read_body
from api.http.errors import responses
from api.http.once import Asked, Once, answer, earlier
from api.http.waiting import Wait, asked_for, has_ended, until
from api.jobs.service import JSON_TYPES, Jobs, decode
from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job
from core.errors import Fault, NotFound, SpecError
from core.jobs.lifecycle import previews
from core.jobs.lifecycle.submit import Actor
from core.jobs.policies.volume import VolumeLimits
from core.jobs.views import queries

router = APIRouter(tags=["files"])

_PREVIEW_ID = re.compile(r"preview-[0-9a-z]{26}")
_FILE, _ID = "file-01kar3v8x5m2h6n9qst4wyz0bc", "preview-01kar3v8x5m2h6n9qst4wyz0bd"
_RESULT: dict[str, Any] = {
    "format": "messages",
    "ok": True,
    "rows": {"file": 84, "refused": 0, "used": 84, "truncated": 2, "dropped": 0, "pieces": 0, "cut_prompts": 0},
    "rendering": {"loss_on": "completions", "family": "chatml", "chat_template": True},
    "max_length": 512,
    "truncation": "cut_right",
    "tokens": {
        "total": 8123, "shortest": 29, "mean": 96.7, "median": 88, "p90": 201, "p99": 540, "longest": 560,
        "histogram": [{"from": 0, "to": 16, "rows": 0}, {"from": 16, "to": 32, "rows": 6}],
    },
    "duplicates": {"rows": 1, "examples": [{"line": 3, "again": [40]}]},
    "epoch": {
        "tokens": 8027, "label_tokens": 2110, "lost_tokens": 96,
        "steps": 11, "batches": 11, "padding_share": 0.31, "total_steps": 33,
    },
    "samples": [
        {
            "line": 1, "tokens": 35, "label_tokens": 8, "cut_from": None,
            "segments": [
                {"text": "<|im_start|>user\nlights on<|im_end|>\n<|im_start|>assistant\n", "learned": False},
                {"text": "lights.on<|im_end|>", "learned": True},
            ],
        }
    ],
    "faults": [],
    "fault_count": 0,
    "notices": [],
}  # fmt: skip
_PREVIEW: dict[str, Any] = {
    "id": _ID,
    "file_id": _FILE,
    "status": "succeeded",
    "reason": "finished",
    "created_at": "2026-11-21T09:20:55.004000Z",
    "finished_at": "2026-11-21T09:20:59.120000Z",
    "progress": {"rows": 84},
    "result": _RESULT,
    "failure": None,
    "links": {"self": f"/files/{_FILE}/previews/{_ID}", "file": f"/files/{_FILE}"},
}
_BODY = {
    "required": True,
    "description": "A job as for `POST /jobs`, without `data.train`: that is this file.",
    "content": {
        media_type: {
            "schema": {
                "type": "object",
                "required": ["model"],
                "description": "As JobSpec; `data` may have `rendering`, and `train` its `format` and `columns`.",
            },
            "example": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "training": {"max_length": 512}},
        }
        for media_type in JSON_TYPES
    },
}


class PreviewView(AttributeDocsModel):
    """What training would make of a file."""

    model_config = ConfigDict(json_schema_extra={"examples": [_PREVIEW]})
    id: str
    file_id: str
    status: str
    """As a job's: queued, preparing, starting, running; and final: succeeded, failed, cancelled."""
    reason: str
    created_at: str
    finished_at: str | None
    progress: dict[str, Any] | None
    """Rows rendered so far: rows."""
    result: dict[str, Any] | None
    """Once it has succeeded (docs/preview.md). `ok` is false where training would refuse rows; `faults` has
    them."""
    failure: dict[str, Any] | None
    """Once it has failed: class, code, message, field."""
    links: dict[str, str]


class PreviewList(BaseModel):
    """Newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_PREVIEW]}]})
    data: list[PreviewView]


async def _preview_id(
    preview_id: Annotated[str, Path(description="Id of a preview.", examples=[_ID])],
) -> str:
    if not _PREVIEW_ID.fullmatch(preview_id):
        raise NotFound(f"there is no preview `{printable(preview_id)}` of this file", field="preview_id")
    return preview_id


PreviewId = Annotated[str, Depends(_preview_id)]


@router.post(
    "/files/{file_id}/preview",
    status_code=202,
    summary="Preview a file",
    response_model=PreviewView,
    response_class=JSONResponse,
    responses={
        200: {"model": PreviewView, "description": "It is over already (`wait`, or it was asked for just before)."},
        **responses(404, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def preview_file(
    request: Request, file_id: FileId, principal: Writing, app: App, once: Asked, wait: Wait = 0.0
) -> Response:
    """Render the file as a job with this model and these options would: histogram of tokens, truncated, dropped and
    duplicate rows, padding, steps, and ten samples with their trained tokens. A worker computes it without a GPU,
    with only the model's tokenizer; poll `GET /files/{id}/previews/{preview_id}` for the result.

    The same question again within ten minutes has the same answer; with an Idempotency-Key, the same preview as it is
    then.
    """
    body = await read_body(request, app.settings.max_body_bytes)
    content_type = request.headers.get("content-type", "")
    asked = await run_in_threadpool(_ask, app, principal, once, file_id, body, content_type)
    return asked_for(asked, await _when_over(app, principal, file_id, json.loads(bytes(asked.body))["id"], wait))


@router.get(
    "/files/{file_id}/previews/{preview_id}",
    summary="Show a preview",
    response_model=PreviewView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
async def show_preview(
    file_id: FileId, preview_id: PreviewId, principal: Reading, app: App, wait: Wait = 0.0
) -> Response:
    """Progress, and the result when it is complete."""
    return JSONResponse(await _when_over(app, principal, file_id, preview_id, wait))


@router.get(
    "/files/{file_id}/previews",
    summary="List a file's previews",
    response_model=PreviewList,
    response_class=JSONResponse,
    responses=responses(404),
)
def list_previews(file_id: FileId, principal: Reading, app: App) -> Response:
    """The newest fifty, newest first."""
    with app.database.read() as session:
        queries.find_file(session, principal.project_id, file_id)
        rows = previews.newest(session, principal, file_id)
        return JSONResponse({"data": [preview_view(row, file_id) for row in rows]})


def _ask(app: AppState, principal: Actor, once: Once, file_id: str, body: bytes, content_type: str) -> Response:
    sent = decode(body, content_type)
    if (found := earlier(app, principal, once, sent)) is not None:
        return found
    with app.database.read() as session:
        queries.find_file(session, principal.project_id, file_id)
    document = _with_file(sent, file_id)
    spec = Jobs(app.database, app.settings, app.layout).resolved(principal, document, preview=True)
    app.layout.require_space(app.settings.min_free_bytes)

    def ask(session: Session) -> dict[str, Any]:
        queries.find_file(session, principal.project_id, file_id, lock="share")
        return {"id": previews.ask(session, principal, spec, file_id, VolumeLimits.of(app.settings)).id}

    return answer(app, principal, once, sent, ask, status=202)


def _with_file(document: Any, file_id: str) -> Any:
    """The job of the body with this file as its training rows."""
    if not isinstance(document, dict):
        return document  # parse_job says what is wrong with it
    data = document.get("data", {})
    train = data.get("train", {}) if isinstance(data, dict) else data
    if isinstance(train, str):
        train = {"id": train}
    if not isinstance(train, dict) or train.get("type", "file") != "file" or train.get("id", file_id) != file_id:
        message = "the file is the one in the path: leave `data.train` out, or give only its `format` and `columns`"
        raise SpecError(message, field="data.train", faults=(Fault("invalid_value", message, "data.train"),))
    source = train | {"type": "file", "id": file_id}
    return document | {"data": (data if isinstance(data, dict) else {}) | {"train": source}}


async def _when_over(app: AppState, principal: Actor, file_id: str, preview_id: str, wait: float) -> dict[str, Any]:
    """The preview, once it is over or `wait` seconds are."""

    def look() -> dict[str, Any]:
        with app.database.read() as session:
            queries.find_file(session, principal.project_id, file_id)
            return preview_view(previews.find(session, principal, file_id, preview_id), file_id)

    return await until(has_ended, look, wait)


def preview_view(job: Job, file_id: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "file_id": file_id,
        "status": job.status,
        "reason": job.reason,
        "created_at": iso(job.created_at),
        "finished_at": iso(job.finished_at),
        "progress": job.progress,
        "result": job.result,
        "failure": job.failure,
        "links": {"self": f"/files/{file_id}/previews/{job.id}", "file": f"/files/{file_id}"},
    }
