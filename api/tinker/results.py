"""What an operation came to, as Tinker's SDK reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response

from api.context import request_id
from api.http.errors import ErrorResponse
from api.tinker import door, downloads
from api.tinker.door import ADAPTER, Door, SamplerId
from api.tinker.forms import messages, plain
from api.tinker.forms.messages import Answered, Scored, Targets
from core.db.tables import SessionOperation, SessionSave
from core.errors import NotFound
from core.jobs.base.states import FINAL, Status
from core.jobs.lifecycle.sessions import saves
from core.jobs.lifecycle.sessions.records import FoundSession
from core.spec.session import tensors

PROTOBUF = "application/x-protobuf"
SAVES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Types of answers by kinds of saved weights."""


def reply(of: Door, found: FoundSession, row: SessionOperation, body: bytes, *, packed: bool) -> Response:
    """The answer to `retrieve_future`. `packed`: the caller reads protocol buffers, as SDKs since 0.25 do."""
    if row.done_at is None:
        if Status(found.job.status) in FINAL:
            return failed(f"the session has ended ({found.status}: {found.job.reason})", "server")
        state = "active" if found.status == "running" else "paused_capacity"
        told = {"type": "try_again", "queue_state": state, "queue_state_reason": found.job.reason}
        return JSONResponse(told | {"request_id": f"{row.session_id}.{row.position}"}, 408)
    if row.error is not None:
        return failed(str(row.error["message"]), "user")
    asked, result = row.operation, row.result or {}
    match asked["op"]:
        case "forward" | "forward_backward":
            arrays = tensors.unpack(body)
            logprobs, lengths = arrays["logprobs"], [int(one) for one in arrays["lengths"]]
            wide = sum(tensors.split(body)[0]["logprobs"]["shape"][1:])
            metrics = {"loss:sum": float(result["loss"])}
            if not packed:
                return plain.pass_answer(lengths, logprobs, metrics, wide)
            return Response(messages.pass_output(lengths, logprobs, metrics, wide), media_type=PROTOBUF)
        case "generate":
            arrays = tensors.unpack(body)
            answers, of_prompt = _sampled(result, arrays, asked.get("sample_top", 0)), _scored(asked, arrays)
            if (scores := arrays.get("prompt_target_logprobs")) is not None:
                wide = tensors.split(body)[0]["prompt_targets"]["shape"][1]
                of_prompt = replace(of_prompt, targets=Targets.of(arrays["prompt_targets"], scores, wide))
            if not packed:
                return plain.sample_answer(answers, of_prompt)
            return Response(messages.sample_output(answers, of_prompt), media_type=PROTOBUF)
        case "step":
            metrics = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
            return JSONResponse({"metrics": metrics, "type": "optim_step"})
        case "create":
            return JSONResponse({"model_id": door.model_id(found), "type": "create_model"})
        case "load":
            folder = Path(asked["folder"])
            path = None
            with suppress(NotFound), of.app.database.read() as session:  # it may have gone since
                source = saves.readable(session, of.actor, folder.parents[2].name, folder.name)
                saved = saves.in_folder(session, source.row.id, folder.name)
                path = None if saved is None else door.tinker_path(source, saved)
            return JSONResponse({"path": path, "model_id": door.model_id(found), "type": "load_weights"})
        case "save":
            return JSONResponse(_saved(of, found, row, str(asked["name"])))
    return failed(f"`{asked['op']}` of `{ADAPTER}` is not a request of this protocol", "user")


def render(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    """The errors of `/api/v1`. A conflict is a 400 there: the SDK sends a 409 again for five minutes."""
    if status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        status = HTTPStatus.BAD_REQUEST
    told = {"code": error["code"], "field": error.get("field"), "request_id": request_id.get()}
    return ErrorResponse({"detail": error["message"], **told}, status, headers=dict(headers or {}))


def failed(message: str, category: str) -> Response:
    return JSONResponse({"error": message, "category": category})


def _saved(of: Door, found: FoundSession, operation: SessionOperation, folder: str) -> dict[str, Any]:
    if folder.startswith("u-"):
        sampler = SamplerId(found.row.id, found.row.id, folder)
        return {"sampling_session_id": str(sampler), "type": "save_weights_for_sampler"}
    with of.app.database.read() as session:
        row = session.get(SessionSave, (operation.session_id, operation.position))
    if row is None:
        raise NotFound("what was saved has gone since", field="request_id")
    told: dict[str, Any] = {"path": door.tinker_path(found, row), "type": SAVES[row.kind]}
    if row.kind == "external_weights":
        told["size_bytes"] = downloads.size(of, row)
    return told


def _sampled(result: dict[str, Any], arrays: dict[str, list[float]], most: int) -> list[Answered]:
    answers, at = [], 0
    for finished, count in zip(result["finished"], arrays["lengths"], strict=True):
        end = at + int(count)
        best = [arrays[name][at * most : end * most] if most else [] for name in ("top_tokens", "top_logprobs")]
        answers.append(Answered(bool(finished), arrays["tokens"][at:end], arrays["logprobs"][at:end], most, *best))
        at = end
    return answers


def _scored(asked: dict[str, Any], arrays: dict[str, list[float]]) -> Scored:
    """What is told of the prompt's tokens. The child tells it at the place of the token before."""
    most, last = asked.get("prompt_top", 0), asked.get("prompt_last")

    def shifted(name: str, wide: int, unknown: float) -> list[float] | None:
        if (found := arrays.get(name)) is None:
            return None
        places = len(found) // wide
        before = max(1, 0 if last is None else places - last)
        return [unknown] * (before * wide) + found[(before - 1) * wide : (places - 1) * wide]

    return Scored(
        shifted("prompt_logprobs", 1, math.nan),
        most,
        [int(one) for one in shifted("prompt_top_tokens", most, 0) or []],
        shifted("prompt_top_logprobs", most, messages.UNKNOWN) or [],
    )
