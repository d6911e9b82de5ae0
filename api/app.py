"""The front door: `create_app()` puts routers, errors and the installation together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from api import health
from api.auth.audit_router import router as audit_router
from api.auth.last_use import LastUse
from api.auth.people_router import router as people_router
from api.auth.policy import Policy, policy_of
from api.auth.router import router as access_router
from api.checkpoints.router import router as checkpoints_router
from api.deps import AppState, authorise, only_known_parameters, public
from api.docs import reference
from api.events.hub import Hub
from api.events.router import router as events_router
from api.export.router import router as export_router
from api.files.preview_router import router as preview_router
from api.files.router import router as files_router
from api.files.upload import remove_stale
from api.http import errors
from api.http.body_limits import RequestLimits
from api.http.middleware import RequestContext
from api.jobs.answers.rollouts_router import router as rollouts_router
from api.jobs.answers.samples_router import router as samples_router
from api.jobs.answers.trace_router import router as trace_router
from api.jobs.lineage_router import router as lineage_router
from api.jobs.output.router import router as job_output_router
from api.jobs.router import router as jobs_router
from api.jobs.schemas import openapi_schemas
from api.mcp.router import router as mcp_router
from api.metrics.router import router as metrics_router
from api.models.exports_router import router as exports_router
from api.models.router import router as models_router
from api.models.upload_router import router as model_upload_router
from api.nodes.router import router as nodes_router
from api.notices.router import router as notices_router
from api.notices.sender import Sender
from api.otlp.exporter import TraceExporter
from api.pipelines.router import router as pipelines_router
from api.pipelines.schemas import openapi_schemas as pipeline_schemas
from api.queue.gpus_router import router as gpus_router
from api.queue.router import router as queue_router
from api.rewards.router import router as rewards_router
from api.serving import replies
from api.serving.router import router as serving_router
from api.sessions.router import router as sessions_router
from api.sessions.wakes import Wakes
from api.sweeps.router import router as sweeps_router
from api.tinker import results as tinker_results
from api.tinker.downloads_router import open_router as downloads_router
from api.tinker.downloads_router import router as tinker_downloads_router
from api.tinker.futures_router import router as tinker_futures_router
from api.tinker.router import router as tinker_router
from api.tinker.runs_router import router as tinker_runs_router
from api.tinker.sampling_router import router as tinker_sampling_router
from api.web import router as web
from api.web.changes import Changes
from core import __version__
from core.db.engine import Database
from core.jobs.lifecycle.sessions import log as session_log
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.open import open_store

DESCRIPTION = """\
Send a job, it waits its turn, trains, and results in a model.

Keys go into `Authorization: Bearer eft_…`. Every error has one shape: code, message, field, faults, request id.
"""
TAGS = [
    {"name": "jobs", "description": "Submit, follow, measure, fetch, cancel."},
    {"name": "pipelines", "description": "Jobs one after another (docs/pipelines.md)."},
    {"name": "sweeps", "description": "One job with other values, run by run (docs/sweeps.md)."},
    {"name": "sessions", "description": "Training loops that run elsewhere (docs/sessions.md)."},
    {"name": "serving", "description": "Ask models, in OpenAI's words (docs/serving.md)."},
    {"name": "models", "description": "What jobs have made: versions, tags, files, lineage (docs/models.md)."},
    {"name": "files", "description": "Training data."},
    {"name": "queue", "description": "The order and why each job waits; GPUs, holds, maintenance; usage and quotas."},
    {"name": "nodes", "description": "The nodes: list, drain, put back into service."},
    {"name": "webhooks", "description": "Notifications about jobs (docs/notices.md)."},
    {"name": "access", "description": "Users, projects, roles, keys, and who changed what (docs/security.md)."},
    {"name": "service", "description": "For probes and monitors."},
]


ROUTERS: tuple[APIRouter, ...] = (
    jobs_router,
    job_output_router,
    samples_router,
    rollouts_router,
    trace_router,
    lineage_router,
    checkpoints_router,
    pipelines_router,
    sweeps_router,
    sessions_router,
    tinker_router,
    tinker_downloads_router,
    downloads_router,
    tinker_futures_router,
    tinker_runs_router,
    tinker_sampling_router,
    serving_router,
    models_router,
    model_upload_router,
    exports_router,
    events_router,
    files_router,
    preview_router,
    rewards_router,
    nodes_router,
    notices_router,
    queue_router,
    gpus_router,
    access_router,
    people_router,
    export_router,
    audit_router,
    metrics_router,
    mcp_router,
    health.router,
    reference.router,
)
"""In the order in which their routes are matched."""
UNPROCESSABLE = {
    "description": "Something in the request is wrong; the faults name it.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}

Policies = dict[tuple[str, str], Policy]
"""By method and path."""


def create_app(settings: Settings) -> FastAPI:
    """The whole application over one database and one data root."""
    state = _state(settings)
    app = FastAPI(
        title="eft",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        lifespan=_lifespan(state),
        openapi_url=None,  # it would be built for each request (api/docs/reference.py)
        docs_url=None,  # its page takes its scripts from elsewhere; a box may have no way there (api/docs/reference.py)
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,  # the redirect would lead to whatever the Host header says
    )
    app.state.eft = state
    app.state.changes = Changes(state.database)
    state.hub.closes_too(app.state.changes.close)
    app.add_middleware(RequestContext, latencies=state.latencies)
    errors.install(app, {"/v1": replies.render, "/api/v1": tinker_results.render})
    app.state.routes = [*app.routes, *(route for router in ROUTERS for route in router.routes)]
    included, app.state.policies = _included()
    app.router.routes.extend(included)
    _describe(app, app.state.policies)
    return app


def _state(settings: Settings) -> AppState:
    layout = Layout(settings.root)
    layout.create()
    database = Database(settings.sqlalchemy_url)
    store = open_store(settings)
    uses = LastUse(database, idle_seconds=settings.session_idle_hours * 3600)

    def answered(session_id: str, least: int) -> tuple[str, list[int]]:
        with database.read() as session:
            return session_log.answered(session, session_id, least)

    wakes = Wakes(layout, answered)
    return AppState(settings, database, layout, store, Hub(database), RequestLimits(settings), uses, wakes)


def _lifespan(state: AppState) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What runs beside the requests."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        remove_stale(state.layout)
        state.hub.runs_on(asyncio.get_running_loop())
        state.last_use.start()
        state.wakes.start()
        sender = Sender(state.database, state.settings)
        sender.start()
        exporter = TraceExporter(state.database, state.settings)
        exporter.start()
        yield
        state.hub.close()
        sender.close()
        exporter.close()
        state.last_use.close()
        state.wakes.close()
        state.upload_threads.shutdown(wait=False, cancel_futures=True)
        state.checkers.close()
        state.database.dispose()

    return lifespan


def make_ready() -> None:
    """Analyse the parameters of all routes, which FastAPI does at the first request otherwise, for a quarter of a
    second: for processes that are forked from this one."""
    for route in _included()[0]:
        route.matches({"type": "http", "method": "GET", "path": "/no/such/path", "root_path": "", "headers": []})


@functools.cache
def _included() -> tuple[list[BaseRoute], Policies]:
    """All routes, those of the dashboard first, and the policies of the others. They are the same in every application
    of this process, since they know neither settings nor database."""
    app = FastAPI(openapi_url=None)  # it has no routes of its own
    policies = {
        (method, route.path_format): policy_of(route)  # raises for a route that states none
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    for web_router in web.ROUTERS:  # its pages show what the routes below answer, and refuse what those refuse
        for route in web_router.routes:
            assert isinstance(route, APIRoute)
            policy_of(route)
        app.include_router(web_router)
    for router in ROUTERS:
        # Those that ask for no key answer while the database does not.
        guards = [Depends(authorise if _asks_for_keys(router) else public)]
        app.include_router(router, dependencies=[*guards, Depends(only_known_parameters)])
    return app.routes, policies


def _describe(app: FastAPI, policies: Policies) -> None:
    """Complete FastAPI's OpenAPI document: the job spec, whose route reads its body by hand, our shape of errors, and
    the policy of each route."""
    plain_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain_openapi()
            schemas = document["components"]["schemas"]
            schemas.update(openapi_schemas() | pipeline_schemas() | errors.error_schemas())
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    operation["x-eft-policy"] = policies[method.upper(), path].document()
                    if "422" in operation["responses"]:
                        operation["responses"]["422"] = UNPROCESSABLE
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _asks_for_keys(router: APIRouter) -> bool:
    return any(policy_of(route).scope is not None for route in router.routes if isinstance(route, APIRoute))
