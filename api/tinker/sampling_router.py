"""`/api/v1`: the part of Tinker's protocol that samples."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import App
from api.http.body import read_body
from api.tinker import door
from api.tinker.door import Door, SamplerId
from api.tinker.forms import bodies
from core.errors import SpecError
from core.jobs.lifecycle.sessions import records, saves

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)


@router.post("/save_weights_for_sampler")
async def save_for_sampler(request: Request, principal: Writing, app: App) -> Response:
    """Save the adapter, and sample from it by path or at once."""
    wish = bodies.parsed(bodies.SamplerSave, await read_body(request, app.settings.max_body_bytes))
    if wish.kind != "snapshot":
        raise SpecError("`kind` is `snapshot`: weights that follow training are missing here", field="kind")
    if wish.path is None and wish.sampling_session_seq_id is None:
        raise SpecError("give `path` or `sampling_session_seq_id`", field="path")
    ticket = await run_in_threadpool(_save, Door(app, principal), wish)
    return JSONResponse({"request_id": ticket})


def _save(of: Door, wish: bodies.SamplerSave) -> str:
    if wish.path is not None:
        return of.save(wish, "sampler_weights")
    return of.keep(of.run(wish.model_id).row.id, wish.seq_id, f"u-{wish.sampling_session_seq_id}")


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, principal: Writing, app: App) -> Response:
    """A sampling session over saved weights or over a base model."""
    wish = bodies.parsed(bodies.NewSampler, await read_body(request, app.settings.max_body_bytes))
    made = await run_in_threadpool(Door(app, principal).sampler, wish)
    return JSONResponse({"sampling_session_id": str(made), "type": "create_sampling_session"})


@router.get("/samplers/{sampler_id}")
def show_sampler(sampler_id: str, principal: Reading, app: App) -> Response:
    """What a sampling session samples from."""
    sampler = SamplerId.read(sampler_id)
    with app.database.read() as session:
        found = records.find(session, principal, sampler.host)
        if sampler.source is not None:
            found = saves.readable(session, principal, sampler.source, sampler.name)
        row = None if sampler.name is None else saves.in_folder(session, found.row.id, sampler.name)
    told = {"sampler_id": sampler_id, "base_model": door.base_model(found)}
    if row is not None:
        told["model_path"] = door.tinker_path(found, row)
    return JSONResponse(told)


@router.post("/asample")
async def asample(request: Request, principal: Writing, app: App) -> Response:
    """Answer a prompt."""
    wish = bodies.parsed(bodies.SampleWish, await read_body(request, app.settings.max_operation_bytes))
    ticket = await run_in_threadpool(Door(app, principal).sample, wish)
    names = [f"{ticket}.{at}" for at in range(wish.num_samples)]
    return JSONResponse({"request_id": ticket, "sample_sequence_ids": names})
