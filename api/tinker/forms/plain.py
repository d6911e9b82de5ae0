"""The same messages in JSON, as SDKs before 0.25 send and read them."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import Response
from pydantic import AliasChoices, Field

from api.tinker.forms.bodies import Lenient, Number, PlainTensor, parsed
from api.tinker.forms.messages import UNKNOWN, Answered, Numbers, PassRequest, Scored, numbers
from core.errors import SpecError


class PlainInput(Lenient):
    chunks: list[dict[str, Any]]


class PlainDatum(Lenient):
    model_input: PlainInput
    loss_fn_inputs: dict[str, PlainTensor]


class PlainPass(Lenient):
    data: list[PlainDatum]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class PlainForward(Lenient):
    model_id: str
    seq_id: Number = 0
    asked: PlainPass = Field(validation_alias=AliasChoices("forward_backward_input", "forward_input"))


def read_pass(forward_only: bool, body: bytes) -> PassRequest:
    """Raises SpecError for what is no such request."""
    sent = parsed(PlainForward, body)
    asked = sent.asked
    found = PassRequest(sent.model_id, sent.seq_id, asked.loss_fn, dict(asked.loss_fn_config or {}), forward_only)
    for place, one in enumerate(asked.data):
        row = tokens(one.model_input.chunks, f"data.{place}.model_input.chunks")
        found.add(row, {name: _values(name, tensor, place) for name, tensor in one.loss_fn_inputs.items()})
    return found


def tokens(chunks: Sequence[Mapping[str, Any]], where: str) -> list[int]:
    """Tokens of chunks of encoded text, one after another. SpecError for others."""
    row: list[int] = []
    for place, chunk in enumerate(chunks):
        found = chunk.get("tokens")
        if chunk.get("type", "encoded_text") != "encoded_text" or not isinstance(found, list):
            words = "sessions take encoded text only: no images, no audio"
            raise SpecError(words, field=f"{where}.{place}", code="invalid_value")
        row += found
    return row


def _values(name: str, tensor: PlainTensor, place: int) -> Numbers:
    where, values = f"data.{place}.loss_fn_inputs.{name}", tensor.data
    if tensor.dtype == "int64":
        if any(value != int(value) for value in values):
            raise SpecError(f"{where}: these are not whole numbers", field=where, code="invalid_value")
        values = [int(value) for value in values]
    crow = tensor.sparse_crow_indices
    indices = None if crow is None else (crow, tensor.sparse_col_indices or [])
    return numbers(values, tensor.shape or [], indices, where)


def pass_answer(
    lengths: Sequence[int], logprobs: Sequence[float], metrics: Mapping[str, float], wide: int = 0
) -> Response:
    """A ForwardBackwardOutput; `wide`: log-probabilities of a token, where it has several targets."""
    outputs, at = [], 0
    for length in lengths:
        part = [*logprobs[at : at + length * (wide or 1)]]
        shape = [length, wide] if wide else [length]
        outputs.append({"logprobs": {"data": part, "dtype": "float32", "shape": shape}})
        at += len(part)
    return _reply({"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(metrics)})


def sample_answer(answers: Sequence[Answered], prompt: Scored) -> Response:
    """A SampleResponse."""
    sequences = [
        {
            "stop_reason": "stop" if one.stopped else "length",
            "tokens": [*map(int, one.tokens)],
            "logprobs": [*array("f", one.logprobs)],
        }
        for one in answers
    ]
    known = None if prompt.logprobs is None else [None if math.isnan(one) else one for one in prompt.logprobs]
    told: dict[str, Any] = {"type": "sample", "sequences": sequences, "prompt_logprobs": known}
    if prompt.most:
        pairs = [*zip(prompt.tokens, prompt.likeliest, strict=True)]
        places = [pairs[at : at + prompt.most] for at in range(0, len(pairs), prompt.most)]
        told["topk_prompt_logprobs"] = [None if place[0][1] == UNKNOWN else place for place in places]
    return _reply(told)


def _reply(document: dict[str, Any]) -> Response:
    """In Python's JSON, which has infinities: those SDKs read it."""
    return Response(json.dumps(document), media_type="application/json")
