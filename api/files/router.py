"""`/files`: training data goes up in one stream, checked on its way, and never through memory or /tmp."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import After, App, Limit
from api.errors import BadRequest, UnsupportedMediaType, nearest, printable
from api.files import budget, schemas, service
from api.files.form import UploadForm
from api.files.receiving import apart, batches
from api.files.upload import FORMATS, Upload, checked_filename
from api.handles import FileId
from api.http.errors import responses
from api.http.once import Asked, answer
from api.http.ranges import FileReply
from core.jobs.views import queries

router = APIRouter(tags=["files"])

RAW_TYPES = (
    "application/jsonl",
    "application/x-ndjson",
    "text/csv",
    "application/vnd.apache.parquet",
    "application/octet-stream",
)
"""The bytes say what they are; the type is the sender's word for them."""
MEDIA_TYPES: dict[str, str] = {
    "jsonl": "application/jsonl",
    "json": "application/json",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}
PURPOSES = ["fine-tune"]

_ROW = '{"messages": [{"role": "user", "content": "lights on"}, {"role": "assistant", "content": "lights.on"}]}\n'
_BODY = {
    "required": True,
    "description": "JSON Lines, JSON, CSV or Parquet. As a form, or raw with `?filename=`.",
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "format": {
                        "type": "string",
                        "enum": list(FORMATS),
                        "description": "What every row shall be; needed only where rows fit two. Before `file`.",
                    },
                    "columns": {
                        "type": "string",
                        "description": "Our names of columns to the file's, as JSON. Before `file`.",
                        "examples": ['{"prompt": "question", "completion": "answer"}'],
                    },
                    "purpose": {"type": "string", "enum": PURPOSES},
                    "file": {"type": "string", "format": "binary"},
                },
            },
            "example": {"file": _ROW},
        },
        **{media_type: {"schema": {"type": "string", "format": "binary"}, "example": _ROW} for media_type in RAW_TYPES},
    },
}


class Sink:
    """Where the parser's findings go: the name is checked when it comes."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self.filename: str | None = None

    def field(self, name: str, value: str) -> None:
        match name:
            case "format" | "columns":
                self._upload.declare(name, value)
            case "purpose":
                if value not in PURPOSES:
                    raise BadRequest(
                        f"unknown purpose `{printable(value)}`; {nearest(value, PURPOSES)}", field="purpose"
                    )

    def file(self, name: str | None) -> None:
        self.filename = checked_filename(name)


@router.post(
    "/files",
    status_code=201,
    summary="Upload training data",
    response_model=schemas.FileView,
    response_class=JSONResponse,
    responses=responses(408, 413, 415, 422, 507),
    openapi_extra={"requestBody": _BODY},
)
async def upload_file(
    request: Request,
    principal: Writing,
    app: App,
    once: Asked,
    filename: Annotated[str | None, Query(description="For raw bodies: how to call it.")] = None,
    format: Annotated[str | None, Query(description="For raw bodies: what every row shall be.")] = None,
    columns: Annotated[
        str | None, Query(description='For raw bodies: `{"prompt": "question"}`, our names first.')
    ] = None,
) -> Response:
    """Upload JSON Lines, JSON, CSV or Parquet. Every row is checked during the upload; the response has a report.

    A row is a chat (`messages`, or ShareGPT's `conversations`), `prompt` and `completion`, `instruction`, `input` and
    `output`, or `text`; for later stages also `chosen` and `rejected`, a `label`, or a `prompt` with its `reference`. A
    file has one kind of row; `columns` maps other names. A file with faults is refused, with line, field and what was
    expected of each, and nothing of it is kept. With an Idempotency-Key the bytes are compared by their SHA-256.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "multipart/form-data" and media_type not in RAW_TYPES:
        raise UnsupportedMediaType(
            f"send multipart/form-data with the field `file`, or raw bytes as {RAW_TYPES[0]} with `?filename=`",
            field="content-type",
        )
    announced = request.headers.get("content-length", "0")
    raw = media_type in RAW_TYPES
    raw_name = checked_filename(filename) if raw else None
    size = int(announced) if announced.isdecimal() else 0
    await run_in_threadpool(budget.require, app.database, app.settings, size)
    upload = await run_in_threadpool(
        Upload, app.layout, app.store, app.settings, app.checkers, announced=size if raw else 0
    )
    kept = False
    try:
        if raw:
            if format is not None:
                upload.declare("format", format)
            if columns is not None:
                upload.declare("columns", columns)
            async for batch in batches(request):
                await apart(request, app, upload.leave, upload.write, batch)
        else:
            sink = Sink(upload)
            form = UploadForm(content_type, on_field=sink.field, on_file=sink.file, on_data=upload.write)
            async for batch in batches(request):
                await apart(request, app, upload.leave, form.feed, batch)
            form.finish()
            raw_name = sink.filename
        stored = await apart(request, app, upload.leave, upload.finish)
        assert raw_name is not None
        name = raw_name
        sent = {"filename": name, "sha256": stored.sha256, "declared": upload.declared}
        reply = await run_in_threadpool(
            answer,
            *(app, principal, once, sent, lambda session: service.record(session, principal, stored, name)),
            status=201,
        )
        kept = "idempotency-replayed" not in reply.headers
    finally:
        if not kept:  # refused, broken off, or the client has left
            upload.abort()
    return reply


@router.get(
    "/files",
    summary="List files",
    response_model=schemas.FilePage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_files(
    principal: Reading,
    app: App,
    sha256: Annotated[
        str | None, Query(pattern=r"^[0-9a-f]{64}$", description="Only with these very bytes: their hash, in hex.")
    ] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """The project's files, newest first, in pages."""
    with app.database.read() as session:
        page = queries.files_page(session, principal.project_id, sha256=sha256, after=after, limit=limit)
    following = page.items[-1].id if page.has_more else None
    data = [schemas.file_view(file) for file in page.items]
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/files/{file_id}",
    summary="Show a file",
    response_model=schemas.FileView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_file(file_id: FileId, principal: Reading, app: App) -> Response:
    """Name, size, hash and row format."""
    with app.database.read() as session:
        return JSONResponse(schemas.file_view(queries.find_file(session, principal.project_id, file_id)))


@router.head("/files/{file_id}/content", include_in_schema=False)
@router.get(
    "/files/{file_id}/content",
    summary="Download a file",
    response_class=Response,
    responses={
        200: {
            "description": "The bytes as they were sent.",
            "content": {"application/jsonl": {"schema": {"type": "string", "format": "binary"}, "example": _ROW}},
        },
        206: {"description": "The range asked for."},
        304: {"description": "The client's copy is the same (If-None-Match)."},
        **responses(404, 410, 416),
    },
)
def get_file(request: Request, file_id: FileId, principal: Reading, app: App) -> Response:
    """The file as uploaded; `Range` resumes an interrupted download. The ETag is its SHA-256."""
    with app.database.read() as session:
        row = queries.find_file(session, principal.project_id, file_id)
    return FileReply(
        request,
        app.store,
        f"files/{file_id}",
        size=row.bytes,
        sha256=row.sha256,
        filename=row.filename,
        media_type=MEDIA_TYPES[(row.report or {}).get("container") or "jsonl"],
    )


@router.delete(
    "/files/{file_id}",
    summary="Delete a file",
    response_model=schemas.FileDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_file(file_id: FileId, principal: Writing, app: App) -> Response:
    """Rejected while an active job trains or evaluates on it."""
    service.remove(app.database, app.store, principal, file_id)
    return JSONResponse({"id": file_id, "deleted": True})
