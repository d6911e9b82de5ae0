"""The page of the boxes: every GPU with its user, and the queue."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.auth.policy import ReadingOrOperating
from api.deps import authorise
from api.jobs.router import list_jobs
from api.nodes.router import list_nodes
from api.queue import gpus_router
from api.queue.router import show_queue
from api.web import render
from api.web.views import Views

USING = ("starting", "running", "pausing", "stopping")
"""States of jobs that have slots."""
router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])


@router.get("/ui/box")
def box_page(request: Request, principal: ReadingOrOperating) -> Response:
    """Every slot of every node with its user, holds and maintenance, and the queue in its order."""
    views = Views(request, principal)
    gpus = views.ask(gpus_router.list_gpus)["data"]
    nodes = views.ask(list_nodes)["data"]
    by_node: dict[str, list[dict[str, Any]]] = {node["name"]: [] for node in nodes}
    for gpu in gpus:
        by_node.setdefault(gpu["node"], []).append(gpu)
    active = views.may(
        list_jobs, status=list(USING), name=None, tag=None, created_after=None, archived=False, limit=200, after=None
    )
    named = {job["id"]: job["name"] for job in (active or {"data": ()})["data"] if job["name"]}
    queue = views.ask(show_queue, limit=200)
    coming: dict[str, dict[str, Any]] = {}
    for one in sorted(queue["data"], key=lambda one: one["estimated_start"] or ""):
        for label in one["estimated_gpus"]:
            coming.setdefault(label, one)
    return render.page(
        request,
        "box.html",
        nodes=nodes,
        by_node=by_node,
        queue=queue,
        coming=coming,
        named=named,
        writes=render.may_write(principal),
        maintenance=views.ask(gpus_router.list_maintenance)["data"],
        holds=views.ask(gpus_router.list_holds)["data"],
        busy=sum(1 for gpu in gpus if gpu["state"] == "busy"),
        total=len(gpus),
    )
