"""`/nodes`: the boxes, what they hold, and taking one out of service without losing work.

Every project's people see the boxes; draining one is for admins of the box. Who did it is in the audit and in every
event.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator
from sqlalchemy.orm import Session

from api.auth.policy import Operating, ReadingOrOperating
from api.deps import App, AppState
from api.fields import shown
from api.http.errors import responses
from api.http.once import Asked, answer
from api.nodes import schemas
from core.jobs.lifecycle.submit import Actor
from core.jobs.policies import nodes

router = APIRouter(tags=["nodes"])

Name = Annotated[str, Path(max_length=255, pattern=r"^[^\x00]*$", description="Name of a node.", examples=["box-1"])]
Reason = Annotated[
    str,
    Query(max_length=500, description="Why; shown with the node and its jobs."),
    AfterValidator(shown),
]


@router.get(
    "/nodes",
    summary="List nodes",
    response_model=schemas.NodeList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_nodes(principal: ReadingOrOperating, app: App) -> Response:
    """The boxes of this installation with their slots and drains."""
    with app.database.read() as session:
        boxes = nodes.boxes(session)
    lease = app.settings.lease_seconds
    return JSONResponse({"data": [schemas.node_view(box, principal.project_id, lease) for box in boxes]})


@router.get(
    "/nodes/{name}",
    summary="Show a node",
    response_model=schemas.NodeView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def show_node(name: Name, principal: ReadingOrOperating, app: App) -> Response:
    """Its slots and their jobs, its last heartbeat, and whether it is drained."""
    with app.database.read() as session:
        return JSONResponse(_view(session, name, principal, app))


@router.post(
    "/nodes/{name}/drain",
    summary="Drain a node",
    response_model=schemas.NodeView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def drain_node(name: Name, principal: Operating, app: App, once: Asked, reason: Reason = "") -> Response:
    """Claim nothing more on this node. Each running trainer writes a checkpoint at its micro-step, and its job
    continues elsewhere, or here after `undrain`. The drain lasts until then, also across restarts of the worker. The
    state is `drained` when nothing runs there. Idempotent."""

    def drain(session: Session) -> dict[str, Any]:
        nodes.drain(session, principal, name, reason)
        return _view(session, name, principal, app)

    return answer(app, principal, once, None, drain)


@router.post(
    "/nodes/{name}/undrain",
    summary="Put a node back into service",
    response_model=schemas.NodeView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def undrain_node(name: Name, principal: Operating, app: App, once: Asked) -> Response:
    """Let the node claim jobs again. Idempotent."""

    def undrain(session: Session) -> dict[str, Any]:
        nodes.undrain(session, principal, name)
        return _view(session, name, principal, app)

    return answer(app, principal, once, None, undrain)


def _view(session: Session, name: str, principal: Actor, app: AppState) -> dict[str, Any]:
    session.expire_all()
    (box,) = nodes.boxes(session, name)
    return schemas.node_view(box, principal.project_id, app.settings.lease_seconds)
