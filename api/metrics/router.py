"""`/metrics`: the installation for Prometheus."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from api.auth.policy import Scraping
from api.deps import App
from api.http.errors import responses
from api.metrics.collect import collect
from api.metrics.exposition import CONTENT_TYPE, Family, page
from api.queue.settings import queue_settings

router = APIRouter(tags=["service"])

EXAMPLE = """\
# HELP eft_jobs Jobs by project and status
# TYPE eft_jobs gauge
eft_jobs{project="voice",status="running"} 2
"""


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format, version 0.0.4.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE}},
        },
        **responses(),
    },
)
def metrics(principal: Scraping, app: App) -> Response:
    """Metrics of queue, jobs, GPUs, nodes and webhooks from the database, the same in every API process, and the
    latencies of this process. It names all projects and is therefore for admins of the box, with a key of scope
    `metrics`, which allows nothing else."""
    began = time.monotonic()
    with app.database.read() as session:
        families = collect(session, queue_settings(app))
    took = Family("eft_scrape_seconds", "gauge", "What this scrape took to read the database")
    took.add(time.monotonic() - began)
    return Response(page([*families, app.latencies.family(), took]), media_type=CONTENT_TYPE)
