"""`/v1`: models that are served, in OpenAI's words (docs/serving.md)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Principal, Reading, Writing
from api.deps import App, AppState
from api.errors import printable
from api.events.router import EventStream
from api.http.body import json_body, read_body
from api.http.errors import responses
from api.serving import bodies, schemas, service
from api.serving.bodies import ChatBody, CompletionBody
from api.serving.replies import Answer, error_body
from core.errors import EftError, NotFound
from core.jobs.views import served

router = APIRouter(prefix="/v1", tags=["serving"])

QUICK_SECONDS = 15.0
"""Time for which an error is still told by the status of a stream's response."""
KEEP_ALIVE_SECONDS = 10.0


@router.post(
    "/chat/completions",
    summary="Answer a conversation",
    response_model=schemas.ChatCompletion,
    response_class=JSONResponse,
    responses=responses(400, 404, 409, 413, 415, 503),
    openapi_extra=json_body(ChatBody, bodies.CHAT_EXAMPLE),
)
async def chat(request: Request, principal: Writing, app: App) -> Response:
    """As OpenAI's route of this name, by a model of the project: `model` names a model, a job, a checkpoint or a base
    (`GET /v1/models`). With `stream`, server-sent events. The model is loaded when it is first asked, on a slot that no
    job needs."""
    body = await read_body(request, app.settings.max_body_bytes)
    return await _answer(request, app, principal, bodies.parsed(ChatBody, body))


@router.post(
    "/completions",
    summary="Continue a text",
    response_model=schemas.TextCompletion,
    response_class=JSONResponse,
    responses=responses(400, 404, 409, 413, 415, 503),
    openapi_extra=json_body(CompletionBody, bodies.COMPLETION_EXAMPLE),
)
async def complete(request: Request, principal: Writing, app: App) -> Response:
    """As OpenAI's route of this name: the prompt is continued as it stands, without a chat template."""
    body = await read_body(request, app.settings.max_body_bytes)
    return await _answer(request, app, principal, bodies.parsed(CompletionBody, body))


@router.get(
    "/models",
    summary="List models that can be asked",
    response_model=schemas.ServedList,
    response_class=JSONResponse,
    responses=responses(400),
)
def list_served(principal: Reading, app: App) -> Response:
    """Models of the project's registry by their names, then the base models of its jobs."""
    with app.database.read() as session:
        data = [_model(*one) for one in served.listed(session, principal)]
    return JSONResponse({"object": "list", "data": data})


@router.get(
    "/models/{model_id:path}",
    summary="Show a model that can be asked",
    response_model=schemas.ServedView,
    response_class=JSONResponse,
    responses=responses(400, 404, 409),
)
def show_served(
    model_id: Annotated[str, Path(max_length=400, description="As `model` of a request.", examples=["voice-intents"])],
    principal: Reading,
    app: App,
) -> Response:
    """Whether a request may name it so."""
    if not model_id.isprintable():
        raise NotFound(f"there is no model `{printable(model_id)}` in this project", field="model")
    with app.database.read() as session:
        served.find(session, principal, app.store, model_id)
    return JSONResponse(_model(model_id, 0.0, principal.project_name))


async def _answer(request: Request, app: AppState, principal: Principal, body: ChatBody | CompletionBody) -> Response:
    number = await run_in_threadpool(service.ask, app, principal, body)
    chat = isinstance(body, ChatBody)
    logprobs = bool(body.logprobs) if isinstance(body, ChatBody) else body.logprobs is not None
    name = f"chat{number}" if chat else number
    answer = Answer(name, body.model, int(time.time()), chat, logprobs)
    news = service.follow(app, number)
    if not body.streamed:
        async with contextlib.aclosing(news):
            async for one in news:
                if one is not None:
                    answer.add(one)
                elif await request.is_disconnected():
                    return Response(status_code=499)
        return JSONResponse(answer.whole())
    # Errors of the first seconds have a status of their own; later ones are events of the stream.
    first: dict[str, Any] | None = None
    until = time.monotonic() + QUICK_SECONDS
    try:
        while first is None and time.monotonic() < until and not await request.is_disconnected():
            first = await anext(news)
    except BaseException:
        await news.aclose()
        raise
    return EventStream(_events(app, answer, news, first, with_usage=body.usage_in_stream))


async def _events(
    app: AppState,
    answer: Answer,
    news: AsyncGenerator[dict[str, Any] | None],
    first: dict[str, Any] | None,
    *,
    with_usage: bool,
) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(news):
        told = time.monotonic()
        try:
            if first is not None:
                for chunk in answer.chunks(first, with_usage=with_usage):
                    yield service.encode(chunk)
            async for one in news:
                if one is not None:
                    for chunk in answer.chunks(one, with_usage=with_usage):
                        yield service.encode(chunk)
                    told = time.monotonic()
                elif time.monotonic() - told > KEEP_ALIVE_SECONDS:
                    yield b": waits\n\n"
                    told = time.monotonic()
        except EftError as error:
            yield service.encode(error_body(error.status, error.as_dict()))
            return
        yield b"data: [DONE]\n\n"


def _model(name: str, made: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(made), "owned_by": owner}
