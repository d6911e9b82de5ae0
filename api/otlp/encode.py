"""A job's trace as OTLP: the request that `POST /v1/traces` of a collector takes, in OTLP's JSON encoding.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: names in lowerCamelCase, ids in hexadecimal, times in
nanoseconds as strings. The SDK of OpenTelemetry records spans as they happen; these have all happened, so that nothing
of it is needed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from core import __version__
from core.jobs.views.trace import TraceSpan

OK, ERROR = 1, 2
"""Codes of a span's status."""
INTERNAL = 1
"""Kind of a span: within one program."""


def request(
    job: str, name: str, began: float, about: Mapping[str, Any], failed: str | None, spans: Sequence[TraceSpan]
) -> dict[str, Any]:
    """One trace: a root span of the whole job, its statuses and attempts below it, phases below their attempt.

    `began`: when it was submitted, Unix seconds. `about`: attributes of the root. `failed`: why the job failed. The ids
    follow from the job's id alone, so that a trace that is sent twice is the same trace.
    """
    trace_id = _digest(16, "trace", job)
    root = _digest(8, "span", job)
    attempts = {one.args["attempt"]: _id(job, one) for one in spans if one.track == "attempts"}
    shown = [one for one in spans if one.end is not None]
    ended = max([began, *(one.end or one.start for one in spans)])
    first = {
        **_span(trace_id, root, None, name, began, ended, about),
        "status": {"code": OK} if failed is None else {"code": ERROR, "message": failed},
        "events": [
            {"name": one.name, "timeUnixNano": _nanos(one.start), "attributes": _attributes(one.args)}
            for one in spans
            if one.end is None
        ],
    }
    below = [
        _span(
            trace_id,
            _id(job, one),
            attempts.get(one.args.get("attempt"), root) if one.track == "phases" else root,
            one.name,
            one.start,
            one.end or one.start,
            {"eft.track": one.track, **one.args},
        )
        for one in shown
    ]
    resource = {"service.name": "eft", "service.version": __version__}
    scope = {"name": "eft.jobs", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": [first, *below]}],
            }
        ]
    }


def _span(
    trace_id: str, span_id: str, parent: str | None, name: str, start: float, end: float, about: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "traceId": trace_id,
        "spanId": span_id,
        **({} if parent is None else {"parentSpanId": parent}),
        "name": name,
        "kind": INTERNAL,
        "startTimeUnixNano": _nanos(start),
        "endTimeUnixNano": _nanos(end),
        "attributes": _attributes(about),
    }


def _id(job: str, one: TraceSpan) -> str:
    return _digest(8, "span", job, one.track, one.name, repr(one.start))


def _digest(length: int, *parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[: 2 * length]


def _nanos(seconds: float) -> str:
    """A time of Unix seconds, to the microsecond: a float holds no more."""
    return str(round(seconds * 1e6) * 1000)


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
