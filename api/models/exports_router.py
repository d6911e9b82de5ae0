"""`/models/{id}/exports`: formats of a model that are made later, as tasks without a GPU."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from api.auth.policy import Reading, Writing
from api.deps import App
from api.errors import printable
from api.handles import ModelId
from api.http.body import Body, json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, answer
from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job
from core.errors import NotFound
from core.jobs.lifecycle.registry import entries, exports
from core.jobs.lifecycle.submit import stop
from core.jobs.policies.volume import VolumeLimits
from core.spec.axes.export import Exports

router = APIRouter(tags=["models"])

_MODEL, _ID = "model-01kar3v8x5m2h6n9qst4wyz0bc", "export-01kar3v8x5m2h6n9qst4wyz0bd"
_EXPORT_ID = re.compile(r"export-[0-9a-z]{26}")
_ASKED = {"export": [{"type": "gguf", "quantization": "Q8_0"}]}
_EXPORT: dict[str, Any] = {
    "id": _ID,
    "model": _MODEL,
    "status": "running",
    "reason": "runs on box-1",
    "created_at": "2026-11-21T10:20:55.004000Z",
    "finished_at": None,
    "export": [{"type": "gguf", "quantization": "Q8_0", "merge_onto": "trained", "min_retention": None}],
    "result": None,
    "failure": None,
    "links": {"self": f"/models/{_MODEL}/exports/{_ID}", "model": f"/models/{_MODEL}"},
}


class ExportWish(Body):
    """Formats to make, as `export` of a job."""

    export: Annotated[Exports, Field(min_length=1)]
    """Formats, e.g. `[merged]` or `[{type: gguf, quantization: Q4_K_M}]` (docs/exports.md)."""
    max_runtime_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Time in which they must be made once a worker has begun, in seconds; beyond it the export fails. Default: no
    limit."""


class ExportView(AttributeDocsModel):
    """Formats of a model that were asked for together."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXPORT]})
    id: str
    model: str
    status: str
    """As a job's: queued, preparing, starting, running, stopping; and final: succeeded, failed, cancelled."""
    reason: str
    created_at: str
    finished_at: str | None
    export: list[dict[str, Any]]
    """Formats, with every default written out."""
    result: list[dict[str, Any]] | None
    """Once it has succeeded: for each format whether it was released, its retention, or why it was not."""
    failure: dict[str, Any] | None
    """Once it has failed: class, code, message, field."""
    links: dict[str, str]


class ExportList(BaseModel):
    """Oldest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_EXPORT]}]})
    data: list[ExportView]


async def _export_id(
    export_id: Annotated[str, Path(description="Id of an export.", examples=[_ID])],
) -> str:
    if not _EXPORT_ID.fullmatch(export_id):
        raise NotFound(f"there is no export `{printable(export_id)}` of this model", field="export_id")
    return export_id


ExportId = Annotated[str, Depends(_export_id)]


@router.post(
    "/models/{model_id}/exports",
    status_code=201,
    summary="Export a model",
    response_model=ExportView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410, 413, 415, 422, 507),
    openapi_extra=json_body(ExportWish, _ASKED),
)
async def export_model(request: Request, model_id: ModelId, principal: Writing, app: App, once: Asked) -> Response:
    """Make formats of a model that its job was not asked for. A worker makes and checks them without a GPU, by the same
    rules as at the end of a training run; then they are formats of the model. Poll
    `GET /models/{id}/exports/{export_id}` for the end."""
    wish = await read_json(request, ExportWish, app.settings.max_body_bytes)

    def ask(session: Session) -> dict[str, Any]:
        _, job = entries.find(session, principal, model_id, lock=True)
        bounds = VolumeLimits.of(app.settings)
        seconds = wish.max_runtime_seconds
        made = exports.ask(session, principal, job, wish.export, bounds, max_runtime_seconds=seconds)
        return export_view(made, model_id)

    def write() -> Response:
        app.layout.require_space(app.settings.min_free_bytes)
        return answer(app, principal, once, wish.model_dump(mode="json"), ask, status=201)

    return await run_in_threadpool(write)


@router.get(
    "/models/{model_id}/exports",
    summary="List a model's exports",
    response_model=ExportList,
    response_class=JSONResponse,
    responses=responses(404),
)
def list_exports(model_id: ModelId, principal: Reading, app: App) -> Response:
    """Those that were asked for after the training."""
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        return JSONResponse({"data": [export_view(row, model_id) for row in exports.of_job(session, job)]})


@router.get(
    "/models/{model_id}/exports/{export_id}",
    summary="Show an export",
    response_model=ExportView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_export(model_id: ModelId, export_id: ExportId, principal: Reading, app: App) -> Response:
    """Status, and what became of each format once it is over."""
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        return JSONResponse(export_view(exports.find(session, job, export_id), model_id))


@router.post(
    "/models/{model_id}/exports/{export_id}/cancel",
    summary="Cancel an export",
    response_model=ExportView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def cancel_export(model_id: ModelId, export_id: ExportId, principal: Writing, app: App, once: Asked) -> Response:
    """At once while it waits; otherwise its process is ended. Nothing of it is kept. Idempotent."""

    def work(session: Session) -> dict[str, Any]:
        _, job = entries.find(session, principal, model_id)
        return export_view(stop(session, principal, exports.find(session, job, export_id)), model_id)

    return answer(app, principal, once, None, work)


def export_view(row: Job, model_id: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "model": model_id,
        "status": row.status,
        "reason": row.reason,
        "created_at": iso(row.created_at),
        "finished_at": iso(row.finished_at),
        "export": row.spec["export"],
        "result": (row.result or {}).get("export"),
        "failure": row.failure,
        "links": {"self": f"/models/{model_id}/exports/{row.id}", "model": f"/models/{model_id}"},
    }
