"""`/models`: list, look, tag, fetch, delete, and where each comes from."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import After, App, Limit
from api.errors import BadRequest, printable
from api.handles import ModelId
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, answer
from api.jobs.lineage_router import Lineage
from api.jobs.output.artifact_reply import DOWNLOAD, artifact_reply
from api.models import schemas, service
from core.errors import NotFound
from core.jobs.admission import lineage
from core.jobs.lifecycle.registry import entries, exports
from core.jobs.views import models

router = APIRouter(tags=["models"])


@router.get(
    "/models",
    summary="List models",
    response_model=schemas.ModelPage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_models(
    principal: Reading,
    app: App,
    name: Annotated[str | None, Query(max_length=100, description="Only of this name: its versions.")] = None,
    tag: Annotated[str | None, Query(max_length=64, description="Only with this tag.")] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """The project's models, newest first, in pages: repeat with `after` = `next` while `has_more`."""
    with app.database.read() as session:
        page = models.page(session, principal.project_id, name=name, tag=tag, after=after, limit=limit)
    following = page.items[-1].id if page.has_more else None
    data = [schemas.model_view(model) for model in page.items]
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/models/{model_id}",
    summary="Show a model",
    response_model=schemas.ModelView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_model(model_id: ModelId, principal: Reading, app: App) -> Response:
    """Base, formats with their retention, evaluation, tags, lineage and size."""
    with app.database.read() as session:
        entries.find(session, principal, model_id)
        return JSONResponse(schemas.model_view(models.describe(session, model_id)))


@router.post(
    "/models/{model_id}/tags",
    summary="Tag a model",
    response_model=schemas.ModelView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410, 413, 415, 422),
    openapi_extra=json_body(schemas.TagChange, {"add": ["production"], "remove": ["candidate"]}),
)
async def tag_model(request: Request, model_id: ModelId, principal: Writing, app: App, once: Asked) -> Response:
    """Add and remove tags; what is in both lists is removed. A tag may be on several models."""
    wish = await read_json(request, schemas.TagChange, app.settings.max_body_bytes)
    for field in ("add", "remove"):
        if (wrong := schemas.wrong_tag(getattr(wish, field))) is not None:
            words = (
                f"`{printable(wrong)}` is not a tag: letters, digits, `.`, `_` and `-`, a letter or digit first, "
                "at most 64 characters"
            )
            raise BadRequest(words, field=field)

    def change(session: Any) -> dict[str, Any]:
        entries.tag(session, principal, model_id, wish.add, wish.remove)
        return schemas.model_view(models.describe(session, model_id))

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(), change)


@router.delete(
    "/models/{model_id}",
    summary="Delete a model",
    response_model=schemas.ModelDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_model(model_id: ModelId, principal: Writing, app: App) -> Response:
    """Delete its weights, exports and cards. Its job stays. Rejected while another job needs the model."""
    return JSONResponse(service.delete(app.database, app.settings, app.layout, app.store, principal, model_id))


@router.get(
    "/models/{model_id}/lineage",
    summary="Show what a model is made of",
    response_model=Lineage,
    response_class=JSONResponse,
    responses=responses(404),
)
def model_lineage(model_id: ModelId, principal: Reading, app: App) -> Response:
    """Hashes of data, spec, chat template, code and weights of its job and of all jobs before it."""
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        return JSONResponse({"data": lineage.of_job(session, job)})


@router.get(
    "/models/{model_id}/files",
    summary="List a model's files",
    response_model=schemas.ModelFiles,
    response_class=JSONResponse,
    responses=responses(404),
)
def list_files_of_model(model_id: ModelId, principal: Reading, app: App) -> Response:
    """Weights, tokenizer, card and exports, each with size, SHA-256 and URL."""
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        rows = exports.artifacts(session, job).values()
    return JSONResponse({"data": [schemas.file_view(model_id, row) for row in rows]})


@router.head("/models/{model_id}/files/{path:path}", include_in_schema=False)
@router.get(
    "/models/{model_id}/files/{path:path}",
    summary="Download a file of a model",
    response_class=Response,
    responses=DOWNLOAD,
)
def get_file_of_model(
    request: Request,
    model_id: ModelId,
    path: Annotated[str, Path(max_length=512, description="As listed.", examples=["adapter/adapter_config.json"])],
    principal: Reading,
    app: App,
) -> Response:
    """One file; `Range` resumes an interrupted download. The ETag is the file's SHA-256."""
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        missing = NotFound("the model has no such file; `GET /models/{id}/files` lists them", field="path")
        if (row := exports.artifacts(session, job).get(path)) is None:
            raise missing
        return artifact_reply(request, app, row, missing=missing)
