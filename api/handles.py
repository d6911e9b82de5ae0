"""Path parameters that name an object by id, by the beginning of its id, by its name, or as `last`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool

from api.deps import App, AppState
from api.errors import printable
from core.errors import NotFound
from core.jobs.base.transitions import Actor
from core.jobs.views import handles
from core.jobs.views.handles import Handled

LONGEST = 300
"""Characters: a name of the longest kind, a file's, and some."""


async def _resolve(request: Request, app: AppState, kind: Handled, handle: str) -> str:
    # A full id needs no look at the database here: its route looks it up.
    if kind.is_id(handle):
        return handle
    if len(handle) > LONGEST or not handle.isprintable():
        raise NotFound(f"there is no {kind.word} `{printable(handle)}` in this project", field=kind.field)
    principal: Actor = request.state.principal  # api.deps.authorise has run

    def look() -> str:
        with app.database.read() as session:
            return handles.resolve(session, principal, kind, handle)

    return await run_in_threadpool(look)


def _words(kind: Handled) -> str:
    return f"Id of a {kind.word}, the beginning of one ({handles.SHORTEST} characters or more), a name, or `last`."


def _example(kind: Handled) -> list[str]:
    return [f"{kind.prefix}-01kar3v8x5m2h6n9qst4wyz0bc"]


async def _job_id(
    request: Request,
    app: App,
    job_id: Annotated[str, Path(description=_words(handles.JOB), examples=_example(handles.JOB))],
) -> str:
    return await _resolve(request, app, handles.JOB, job_id)


async def _file_id(
    request: Request,
    app: App,
    file_id: Annotated[str, Path(description=_words(handles.FILE), examples=_example(handles.FILE))],
) -> str:
    return await _resolve(request, app, handles.FILE, file_id)


async def _pipeline_id(
    request: Request,
    app: App,
    pipeline_id: Annotated[str, Path(description=_words(handles.PIPELINE), examples=_example(handles.PIPELINE))],
) -> str:
    return await _resolve(request, app, handles.PIPELINE, pipeline_id)


async def _webhook_id(
    request: Request,
    app: App,
    webhook_id: Annotated[str, Path(description=_words(handles.WEBHOOK), examples=_example(handles.WEBHOOK))],
) -> str:
    return await _resolve(request, app, handles.WEBHOOK, webhook_id)


JobId = Annotated[str, Depends(_job_id)]
FileId = Annotated[str, Depends(_file_id)]
PipelineId = Annotated[str, Depends(_pipeline_id)]
WebhookId = Annotated[str, Depends(_webhook_id)]
