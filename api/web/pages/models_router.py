"""The pages of the registry: the list, and one model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.auth.policy import Reading
from api.deps import After, App, AppState, authorise
from api.handles import ModelId
from api.models import exports_router
from api.models import router as registry
from api.web import render, words
from api.web.pages import family
from api.web.views import Views
from core.jobs.lifecycle.registry import entries
from core.jobs.views import models
from core.spec.axes.export import formats

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
ROWS = 100


@router.get("/ui/models")
def models_page(
    request: Request,
    principal: Reading,
    name: Annotated[str, Query(max_length=100, pattern=r"^[^\x00]*$")] = "",
    tag: Annotated[str, Query(max_length=64, pattern=r"^[^\x00]*$")] = "",
    after: After = None,
) -> Response:
    """The project's models, newest first."""
    views = Views(request, principal)
    found = views.ask(registry.list_models, name=name or None, tag=tag or None, limit=ROWS, after=after)
    return render.page(
        request,
        "models.html",
        models=found["data"],
        more=found["next"],
        name=name,
        tag=tag,
        first_page=after is None,
    )


@router.get("/ui/models/{model_id}")
def model_page(request: Request, model_id: ModelId, principal: Reading, app: App) -> Response:
    """One model: formats with their retention, figures, files, tags, and where it comes from."""
    views = Views(request, principal)
    model = views.ask(registry.show_model, model_id=model_id)
    lineage = views.ask(registry.model_lineage, model_id=model_id)["data"]
    made = {one["folder"] for one in model["formats"] if one["released"]}
    return render.page(
        request,
        "model.html",
        model=model,
        files=views.ask(registry.list_files_of_model, model_id=model_id)["data"],
        exports=views.ask(exports_router.list_exports, model_id=model_id)["data"],
        lineage=lineage,
        drawing=_family(app, principal, model_id, model, lineage),
        writes=render.may_write(principal),
        choices=[(folder, wish) for folder, wish in formats() if folder not in made],
        versions=views.ask(registry.list_models, name=model["name"], tag=None, limit=ROWS, after=None)["data"]
        if model["name"]
        else [],
    )


def _family(
    app: AppState, principal: Reading, model_id: str, model: dict[str, Any], lineage: list[dict[str, Any]]
) -> family.Drawing:
    with app.database.read() as session:
        _, job = entries.find(session, principal, model_id)
        made = [
            {
                "job": child.id,
                "name": child.name,
                "stage": child.spec["stage"]["type"],
                "method": child.spec["method"]["type"],
                "parent": child.spec["model"].get("id") if child.spec["model"]["type"] == "job" else None,
            }
            for _, child in models.made_from(session, job)
        ]
        jobs = [one["job"] for one in (*lineage, *made)]
        known = entries.of_jobs(session, principal, jobs)
    return family.draw(words.model_name(model["base"]), lineage, made, known)
