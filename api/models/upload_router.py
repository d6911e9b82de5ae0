"""`POST /models`: a model or an adapter that was made elsewhere comes up file by file, in one form."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth.policy import Principal, Writing
from api.deps import App, AppState
from api.errors import BadRequest, UnsupportedMediaType, printable
from api.files import budget
from api.files.form import UploadForm
from api.files.receiving import apart, batches
from api.http.errors import responses
from api.http.once import Asked, answer
from api.jobs.service import Jobs
from api.models import schemas
from api.models.upload import ModelUpload
from core.errors import SpecError
from core.jobs.lifecycle.registry import uploads
from core.jobs.policies.volume import VolumeLimits
from core.jobs.views import handles, models
from core.plan.models.uploaded import Uploaded
from core.spec.axes.model import HubModel, JobModel
from core.spec.job import JobSpec
from core.spec.load import parse_job

router = APIRouter(tags=["models"])

FIELDS = ("file", "name", "base")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,98}[A-Za-z0-9])?")
_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_BODY = {
    "required": True,
    "description": "A form with each file of the folder as a field `file`.",
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "name": {"type": "string", "description": "Display name; several models may share one."},
                    "base": {
                        "type": "string",
                        "description": "For an adapter: the base model, as `model` of a job (text, or an object as "
                        "JSON). Default: the hub repository that adapter_config.json names.",
                    },
                    "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
                },
            },
            "example": {"name": "voice intents", "file": ["adapter_config.json", "adapter_model.safetensors"]},
        },
    },
}


@router.post(
    "/models",
    status_code=201,
    summary="Upload a model",
    response_model=schemas.ModelView,
    response_class=JSONResponse,
    responses=responses(404, 408, 409, 413, 415, 422, 507),
    openapi_extra={"requestBody": _BODY},
)
async def upload_model(request: Request, principal: Writing, app: App, once: Asked) -> Response:
    """Enter a model or a LoRA adapter that was made elsewhere: the files of its folder, weights as safetensors. A model
    is trained further, and an adapter continued, with `model: {type: registry, id: …}` of a job. Files that can run
    code, tensors with NaN, and files that do not fit one another are refused, and nothing is kept of them."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedMediaType("send multipart/form-data with the files as `file`", field="content-type")
    announced = request.headers.get("content-length", "0")
    size = int(announced) if announced.isdecimal() else 0
    await run_in_threadpool(budget.require, app.database, app.settings, size)
    upload = await run_in_threadpool(ModelUpload, app.layout, app.store, app.settings, size)
    kept = False
    try:
        fields: dict[str, str] = {}
        form = UploadForm(
            content_type,
            on_field=fields.__setitem__,
            on_file=upload.begin,
            on_data=upload.write,
            fields=FIELDS,
            several=True,
        )
        async for batch in batches(request):
            await apart(request, app, upload.leave, form.feed, batch)
        form.finish()

        def enter() -> Response:
            return _enter(app, principal, once, upload, fields)

        reply = await apart(request, app, upload.leave, enter)
        kept = "idempotency-replayed" not in reply.headers
    finally:
        if not kept:  # refused, broken off, or the client has left
            await run_in_threadpool(upload.abort)
    return reply


def _enter(app: AppState, principal: Principal, once: Any, upload: ModelUpload, fields: dict[str, str]) -> Response:
    name = fields.get("name")
    if name is not None and not _NAME.fullmatch(name):
        words = f"`{printable(name)}` is not a name: letters, digits, space, dot, dash and underscore, at most 100"
        raise BadRequest(f"{words} characters", field="name")
    found = upload.check()
    over = None
    if found.kind == "adapter":
        over = _over(app, principal, found, name, fields.get("base"))
    elif "base" in fields:
        raise BadRequest("`base` is for adapters; these files are a whole model: leave it out", field="base")
    stored = upload.finish(found)

    def record(session: Session) -> dict[str, Any]:
        bounds = VolumeLimits.of(app.settings)
        model_id = uploads.record(session, principal, stored, name=name, over=over, bounds=bounds)
        return schemas.model_view(models.describe(session, model_id))

    sent = {"files": upload.sent, **fields}
    return answer(app, principal, once, sent, record, status=201)


def _over(app: AppState, principal: Principal, found: Uploaded, name: str | None, given: str | None) -> JobSpec:
    """The job that would have trained the adapter. Raises BadRequest, SpecError, NotFound."""
    named = found.base if found.base is not None and _HUB.fullmatch(found.base) else None
    base: Any
    if given is not None:
        try:
            base = json.loads(given) if given.lstrip().startswith("{") else given
        except ValueError as error:
            raise BadRequest(f"`base` is not valid JSON: {error}", field="base") from error
    elif named is not None:
        base = f"{named}@{found.revision}" if found.revision else named
    else:
        shown = "no base model" if found.base is None else f"`{printable(found.base)}` as its base, a folder elsewhere"
        words = f"adapter_config.json names {shown}: say with `base` which model of the hub, folder or registry it is"
        raise BadRequest(words, field="base")
    document = {"model": base, "data": uploads.ROWLESS.model_dump(mode="json"), "name": name}
    method = found.method.model_dump(mode="json", exclude_none=True)
    jobs = Jobs(app.database, app.settings, app.layout)
    try:
        plain = parse_job(document | {"method": method})
        with app.database.read() as session:
            model = handles.named_model(session, principal, plain.model)
            uploads.require_whole(session, principal, model)
        spec = jobs.resolved(principal, plain.model_copy(update={"model": model}).model_dump(mode="json"), rowless=True)
    except SpecError as error:
        raise _of_base(error) from error
    if isinstance(spec.model, HubModel) and named is not None and spec.model.id.lower() != named.lower():
        words = (
            f"adapter_config.json says that the adapter was trained over `{named}`, and `base` is `{spec.model.id}`; "
            "if both are the same model, change `base_model_name_or_path` in adapter_config.json"
        )
        raise BadRequest(words, field="base", code="adapter_of_another_base")
    assert not isinstance(spec.model, JobModel) or spec.model.adapter != "continue"
    return spec


def _of_base(error: SpecError) -> SpecError:
    """The same with the field of this form."""
    field = re.sub(r"^model\b", "base", error.field or "base")
    return SpecError(error.message, field=field, faults=error.faults, code=error.code)
