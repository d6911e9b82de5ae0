"""Tinker's two messages in protocol buffers that are answered, and the one that is asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.tinker import wire
from core.errors import SpecError

_FLOAT32, _INT64, _INT32 = 1, 2, 3
_CODES = {_FLOAT32: "f", _INT64: "q", _INT32: "i"}


@dataclass(slots=True)
class PassRequest:
    """A forward pass, with or without gradients."""

    model_id: str = ""
    seq_id: int = 0
    loss: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = False
    rows: list[list[int]] = field(default_factory=list)
    inputs: list[dict[str, list[float]]] = field(default_factory=list)


def read_pass(body: bytes) -> PassRequest:
    """Raises SpecError for what is no such request."""
    found, numbers, options = PassRequest(), dict[str, Any](), dict[str, Any]()
    for number, value in wire.fields(body):
        match number:
            case 1:
                found.model_id = wire.text(value)
            case 2:
                found.seq_id = wire.whole(value)
            case 3:
                row, inputs = _datum(wire.sub(value), len(found.rows))
                found.rows.append(row)
                found.inputs.append(inputs)
            case 4:
                found.loss = wire.text(value)
            case 5:
                entry = dict(wire.fields(wire.sub(value)))
                numbers[wire.text(entry.get(1, b""))] = wire.double(entry.get(2, bytes(8)))
            case 6:
                found.forward_only = bool(wire.whole(value))
            case 7:
                entry = dict(wire.fields(wire.sub(value)))
                options[wire.text(entry.get(1, b""))] = _option(wire.sub(entry.get(2, b"")))
    found.options = numbers | options
    return found


def _option(body: bytes) -> float | str:
    for number, value in wire.fields(body):
        return wire.double(value) if number == 1 else wire.text(value)
    return 0.0


def _datum(body: bytes, place: int) -> tuple[list[int], dict[str, list[float]]]:
    row, inputs = list[int](), dict[str, list[float]]()
    for number, value in wire.fields(body):
        if number == 1:
            for kind, chunk in wire.fields(wire.sub(value)):
                if kind != 1:
                    raise SpecError(
                        "sessions take text only: no images, no audio",
                        field=f"data.{place}.model_input",
                        code="invalid_value",
                    )
                row += [int(one) for one in _array("i", wire.sub(dict(wire.fields(wire.sub(chunk))).get(1, b"")))]
        elif number == 2:
            entry = dict(wire.fields(wire.sub(value)))
            name = wire.text(entry.get(1, b""))
            inputs[name] = _tensor(wire.sub(entry.get(2, b"")), f"data.{place}.loss_fn_inputs.{name}")
    return row, inputs


def _tensor(body: bytes, where: str) -> list[float]:
    code, raw, shape = "f", b"", list[int]()
    for number, value in wire.fields(body):
        match number:
            case 1:
                raw = wire.sub(value)
            case 2:
                raise SpecError(
                    f"{where}: sparse tensors are not taken yet; send it dense", field=where, code="invalid_value"
                )
            case 3:
                if (code := _CODES.get(wire.whole(value), "")) == "":
                    raise SpecError(f"{where}: its type is float32 or int64", field=where, code="invalid_value")
            case 4:
                shape += wire.integers(value)
    if len(shape) > 1:
        raise SpecError(
            f"{where}: one number a token is taken; this has shape {shape}", field=where, code="invalid_value"
        )
    return [*_array(code, raw)]


def _array(code: str, raw: bytes) -> Sequence[float]:
    found = array(code)
    if len(raw) % found.itemsize:
        raise SpecError("a tensor's bytes are no whole number of values", field="body", code="invalid_value")
    found.frombytes(raw)
    return found


def pass_output(lengths: Sequence[int], logprobs: Sequence[float], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: `logprobs` one after another, `lengths` each."""
    offsets = array("q", [0])
    for length in lengths:
        offsets.append(offsets[-1] + 4 * length)
    tensor = wire.message((1, array("f", logprobs).tobytes()), (2, offsets.tobytes()), (3, _FLOAT32))
    record = wire.message((1, "TensorData"), (2, wire.message((1, "logprobs"), (2, tensor))), (3, len(lengths)))
    told = [(3, wire.message((1, name), (2, float(value)))) for name, value in metrics.items()]
    return wire.message((1, "ArrayRecord"), (2, record), *told)


def sample_output(
    answers: Sequence[tuple[bool, Sequence[float], Sequence[float]]], prompt: Sequence[float] | None
) -> bytes:
    """A SampleResponse: of each answer, whether a stop ended it, its tokens and their log-probabilities."""
    parts = []
    for stopped, tokens, logprobs in answers:
        raw = array("i", [int(token) for token in tokens]).tobytes()
        one = wire.message((1, 0 if stopped else 1), (2, raw), (3, array("f", logprobs).tobytes()))
        parts.append((1, one))
    known = [] if prompt is None else [(2, array("f", [math.nan, *prompt[:-1]]).tobytes())]
    return wire.message(*parts, *known)
