"""Tinker's two messages in protocol buffers that are answered, and the one that is asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from api.tinker.forms import wire
from api.tinker.forms.bodies import PlainTensor
from core.errors import SpecError
from core.spec.session import tensors

_FLOAT32, _INT64, _INT32 = 1, 2, 3
_CODES = {_FLOAT32: "f", _INT64: "q", _INT32: "i"}


UNKNOWN = -99999.0
"""Log-probability of a place of which nothing is told; its token is 0."""
MOST_CELLS = 1 << 22
"""Numbers of one tensor when it is written out."""

Numbers = tuple[list[float], int]
"""Values in rows, and how many a row has; 0: a flat list."""


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
    columns: dict[str, int] = field(default_factory=dict)
    """Numbers of a token in inputs that have two dimensions, the same in all data."""

    def add(self, row: list[int], inputs: Mapping[str, Numbers]) -> None:
        """One more datum. SpecError where an input has another width than in those before."""
        place = len(self.rows)
        tensors.check_examples(place + 1, "data")
        for name, (_, wide) in inputs.items():
            if (self.columns.setdefault(name, wide) if place == 0 else self.columns.get(name, wide)) != wide:
                words = f"datum {place}: `{name}` has {wide} columns, and {self.columns[name]} in the first datum"
                raise SpecError(words, field=f"data.{place}.loss_fn_inputs.{name}", code="invalid_value")
        self.rows.append(row)
        self.inputs.append({name: values for name, (values, _) in inputs.items()})


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
                found.add(*_datum(wire.sub(value), len(found.rows)))
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


def _datum(body: bytes, place: int) -> tuple[list[int], dict[str, Numbers]]:
    row, inputs = list[int](), dict[str, Numbers]()
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


def _tensor(body: bytes, where: str) -> Numbers:
    code, raw, sparse, shape = "f", b"", None, list[int]()
    for number, value in wire.fields(body):
        match number:
            case 1:
                raw = wire.sub(value)
            case 2:
                parts = {key: wire.sub(part) for key, part in wire.fields(wire.sub(value))}
                raw, sparse = parts.get(1, b""), (parts.get(2, b""), parts.get(3, b""))
            case 3:
                if (code := _CODES.get(wire.whole(value), "")) == "":
                    raise SpecError(f"{where}: its type is float32 or int64", field=where, code="invalid_value")
            case 4:
                shape += wire.integers(value)
    values = [*_array(code, raw)]
    indices = None if sparse is None else tuple([int(one) for one in _array("q", part)] for part in sparse)
    return numbers(values, shape, indices, where)


def numbers(
    values: list[float],
    shape: Sequence[int],
    indices: tuple[Sequence[int], ...] | None,
    where: str,
    unlisted: float = 0,
) -> Numbers:
    """A tensor of one or two dimensions, written out. `indices`: those of rows and columns, of a sparse one (CSR);
    `unlisted`: what it has elsewhere."""
    if len(shape) > 2 or any(not 0 < size <= MOST_CELLS for size in shape) or math.prod(shape) > MOST_CELLS:
        words = (
            f"{where}: a tensor has one or two dimensions and {MOST_CELLS:,} numbers at most; this has {list(shape)}"
        )
        raise SpecError(words, field=where, code="invalid_value")
    wide = shape[1] if len(shape) == 2 else 0
    if indices is not None:
        values = _written_out(values, shape, *indices, where=where, unlisted=unlisted)
    if shape and len(values) != math.prod(shape):
        words = f"{where}: {len(values)} numbers are not of shape {list(shape)}"
        raise SpecError(words, field=where, code="invalid_value")
    return values, wide


def _written_out(
    values: list[float],
    shape: Sequence[int],
    rows: Sequence[int],
    columns: Sequence[int],
    *,
    where: str,
    unlisted: float,
) -> list[float]:
    whole = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and all(one <= other for one, other in pairwise(rows))
        and all(0 <= column < shape[1] for column in columns)
    )
    if not whole:
        words = f"{where}: its indices of rows and columns are those of no sparse tensor of shape {list(shape)}"
        raise SpecError(words, field=where, code="invalid_value")
    found: list[float] = [unlisted] * math.prod(shape)
    for row, (begin, end) in enumerate(pairwise(rows)):
        for at in range(begin, end):
            found[row * shape[1] + columns[at]] = values[at]
    return found


def _array(code: str, raw: bytes) -> Sequence[float]:
    found = array(code)
    if len(raw) % found.itemsize:
        raise SpecError("a tensor's bytes are not a whole number of values", field="body", code="invalid_value")
    found.frombytes(raw)
    return found


def pass_output(
    lengths: Sequence[int], logprobs: Sequence[float], metrics: Mapping[str, float], wide: int = 0
) -> bytes:
    """A ForwardBackwardOutput: `logprobs` one after another, `lengths` each, or so many rows of `wide`."""
    offsets = array("q", [0])
    for length in lengths:
        offsets.append(offsets[-1] + 4 * length * (wide or 1))
    trailing = [(4, wire.packed([wide]))] if wide else []
    tensor = wire.message((1, array("f", logprobs).tobytes()), (2, offsets.tobytes()), (3, _FLOAT32), *trailing)
    record = wire.message((1, "TensorData"), (2, wire.message((1, "logprobs"), (2, tensor))), (3, len(lengths)))
    told = [(3, wire.message((1, name), (2, float(value)))) for name, value in metrics.items()]
    return wire.message((1, "ArrayRecord"), (2, record), *told)


UNLISTED = -2
"""Where a sparse tensor of tokens has none; -1: where a dense one has none."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Log-probabilities of tokens that the caller has named for each place but the first, in the form in which it did:
    rows of `wide`, or of the `places` that were listed."""

    count: int
    wide: int
    logprobs: list[float]
    places: list[list[int]] | None

    @classmethod
    def of(cls, named: Sequence[float], logprobs: Sequence[float], wide: int) -> Targets:
        """`named`: as `read_targets` makes them; `logprobs`: one for each."""
        count = len(named) // wide - 1
        if UNLISTED not in named[: count * wide]:
            return cls(count, wide, [*logprobs[: count * wide]], None)
        places = [[column for column in range(wide) if named[row * wide + column] != UNLISTED] for row in range(count)]
        flat = [logprobs[row * wide + column] for row, place in enumerate(places) for column in place]
        return cls(count, wide, flat, places)


def read_targets(tensor: PlainTensor, prompt: int) -> Numbers:
    """Tokens named for each place of a prompt but the first, [prompt, choices]: UNLISTED where there are none, which is
    so in the last row. SpecError for another shape."""
    where, shape = "target_prompt_logprobs", tensor.shape or []
    whole = tensor.dtype == "int64" and all(value == int(value) for value in tensor.data)
    if not whole or len(shape) != 2 or shape[0] != prompt - 1:
        words = f"{where}: these are whole numbers of shape [{prompt - 1}, choices], a row for each token but the first"
        raise SpecError(words, field=where, code="invalid_value")
    indices = None
    if tensor.sparse_crow_indices is not None:
        indices = tensor.sparse_crow_indices, tensor.sparse_col_indices or []
    values, wide = numbers(tensor.data, shape, indices, where, unlisted=UNLISTED)
    return [*(int(value) for value in values), *[UNLISTED] * wide], wide


@dataclass(frozen=True, slots=True)
class Scored:
    """What is told of a prompt's tokens."""

    logprobs: list[float] | None
    """One for each token; NaN where nothing is told, as for the first."""
    most: int
    """Likeliest tokens of a place."""
    tokens: list[int]
    """Those of one place after another."""
    likeliest: list[float]
    """Their log-probabilities; UNKNOWN where nothing is told."""
    targets: Targets | None = None
    """Log-probabilities of tokens that the caller has named; None: it has named none."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer to a prompt."""

    stopped: bool
    """A stop ended it."""
    tokens: Sequence[float]
    logprobs: Sequence[float]
    most: int = 0
    """Likeliest tokens of a place."""
    likeliest: Sequence[float] = ()
    """Those of one place after another."""
    of_likeliest: Sequence[float] = ()
    """Their log-probabilities."""


def sample_output(answers: Sequence[Answered], prompt: Scored) -> bytes:
    """A SampleResponse."""
    parts: list[tuple[int, bytes]] = []
    for one in answers:
        raw = array("i", [int(token) for token in one.tokens]).tobytes()
        told = [(4, _likeliest(one.most, one.likeliest, one.of_likeliest))] if one.most else []
        found = wire.message((1, 0 if one.stopped else 1), (2, raw), (3, array("f", one.logprobs).tobytes()), *told)
        parts.append((1, found))
    if prompt.logprobs is not None:
        parts.append((2, array("f", prompt.logprobs).tobytes()))
    if prompt.most:
        parts.append((3, _likeliest(prompt.most, prompt.tokens, prompt.likeliest)))
    if prompt.targets is not None:
        parts.append((5, _floats(prompt.targets)))
    return wire.message(*parts)


def _likeliest(most: int, tokens: Sequence[float], logprobs: Sequence[float]) -> bytes:
    """A TopkLogprobs."""
    ids = array("i", [int(token) for token in tokens]).tobytes()
    return wire.message((1, ids), (2, array("f", logprobs).tobytes()), (3, most), (4, len(tokens) // most))


def _floats(rows: Targets) -> bytes:
    """A Tensor of two dimensions."""
    if rows.places is None:
        values = (1, array("f", rows.logprobs).tobytes())
    else:
        ends, columns = array("q", [0]), array("q")
        for place in rows.places:
            columns.extend(place)
            ends.append(len(columns))
        found = array("f", rows.logprobs).tobytes()
        values = (2, wire.message((1, found), (2, ends.tobytes()), (3, columns.tobytes())))
    return wire.message(values, (3, _FLOAT32), (4, wire.packed([rows.count, rows.wide])))
