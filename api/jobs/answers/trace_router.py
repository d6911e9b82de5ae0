"""`/jobs/{id}/trace`: where a job's time went, for Perfetto."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

from api.auth.policy import Reading
from api.deps import App
from api.handles import JobId
from api.http.errors import responses
from core.base.attribute_docs import AttributeDocsModel
from core.jobs.lifecycle.submit import find
from core.jobs.views.trace import trace

router = APIRouter(tags=["jobs"])

_SPAN: dict[str, Any] = {
    "ph": "X",
    "pid": 1,
    "tid": 3,
    "cat": "phases",
    "name": "loading",
    "ts": 2100000,
    "dur": 840000,
    "args": {"seq": 4, "attempt": 2},
}


class TraceView(AttributeDocsModel):
    """Chrome's trace format; https://ui.perfetto.dev opens it as a file."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "displayTimeUnit": "ms",
                    "otherData": {"job": "job-01kar3v8x5m2h6n9qst4wyz0bc", "began": 1763716857.1, "all_events": True},
                    "traceEvents": [_SPAN],
                }
            ]
        },
    )
    displayTimeUnit: str  # noqa: N815 - the format's own name
    otherData: dict[str, Any]  # noqa: N815
    """The job, the time it was submitted in Unix seconds (`ts` 0), and whether all of its events are in the trace."""
    traceEvents: list[dict[str, Any]]  # noqa: N815
    """Spans (`X`) and instants (`i`), in microseconds: tracks `status`, `attempts`, `phases`, `steps`, `events`."""


@router.get(
    "/jobs/{job_id}/trace",
    summary="Trace of a job",
    response_model=TraceView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def job_trace(job_id: JobId, principal: Reading, app: App) -> Response:
    """Where the job's time went, from queue to export, as a trace that Perfetto and chrome://tracing open."""
    with app.database.read() as session:
        job = find(session, principal, job_id)
        return JSONResponse(trace(session, job, time.time()))
