"""Path parameters that name an object by id, by the beginning of its id, by its name, or as `last`."""

# No `from __future__ import annotations`: FastAPI reads the annotations of `_dependency`'s function.
from collections.abc import Awaitable, Callable
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


def _dependency(kind: Handled) -> Callable[..., Awaitable[str]]:
    """A route's path parameter `{job_id}`, `{file_id}` … as the id that it means."""
    words = f"Id of a {kind.word}, the beginning of one ({handles.SHORTEST} characters or more), a name, or `last`."
    examples = [f"{kind.prefix}-01kar3v8x5m2h6n9qst4wyz0bc"]

    async def found(
        request: Request,
        app: App,
        handle: Annotated[str, Path(alias=kind.field, description=words, examples=examples)],
    ) -> str:
        return await _resolve(request, app, kind, handle)

    return found


JobId = Annotated[str, Depends(_dependency(handles.JOB))]
ModelId = Annotated[str, Depends(_dependency(handles.MODEL))]
FileId = Annotated[str, Depends(_dependency(handles.FILE))]
SweepId = Annotated[str, Depends(_dependency(handles.SWEEP))]
SessionId = Annotated[str, Depends(_dependency(handles.SESSION))]
PipelineId = Annotated[str, Depends(_dependency(handles.PIPELINE))]
WebhookId = Annotated[str, Depends(_dependency(handles.WEBHOOK))]
