"""Traces of jobs as an OpenTelemetry collector gets them: over HTTP, read by OpenTelemetry's own message classes."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from api.otlp.exporter import Away, TraceExporter
from core.db.tables import Job
from core.jobs.lifecycle.finish import Failed, Requeued, Succeeded
from core.settings import Settings

ROW = b'{"prompt": "say a", "completion": " b"}\n'


class Collector(ThreadingHTTPServer):
    """Answers with what is in `answers`, then 200; keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        status = self.server.answers.pop(0) if self.server.answers else 200
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the error output."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def exporter(api: Any, collector: Collector) -> Iterator[TraceExporter]:
    """Beside the API, which has none. What other tests left is sent, and forgotten."""
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/"
    exporter = TraceExporter(api.database, Settings(otlp_endpoint=endpoint, otlp_headers=("x-team=lab a",)))
    while exporter.turn():
        collector.seen.clear()
    yield exporter
    exporter.close()


def told(collector: Collector) -> list[Any]:
    """Spans of the one trace that was sent last, read as a collector reads them."""
    path, headers, body = collector.seen[-1]
    assert (path, headers["content-type"], headers["x-team"]) == ("/v1/traces", "application/json", "lab a")
    # OTLP writes ids in hexadecimal, where protobuf's JSON has base64.
    in_base64 = re.sub(rb'("(?:trace|span|parentSpan)Id": ?")([0-9a-f]+)"', _in_base64, body)
    found = Parse(in_base64, ExportTraceServiceRequest())  # raises for a field that OTLP has not
    (resource,) = found.resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "eft"
    return list(resource.scope_spans[0].spans)


def _in_base64(found: re.Match[bytes]) -> bytes:
    return found[1] + base64.b64encode(bytes.fromhex(found[2].decode())) + b'"'


@pytest.mark.both_databases
def test_a_job_that_ended_is_one_trace(api: Any, collector: Collector, exporter: TraceExporter) -> None:
    job_id, token = api.start_job(name="traced", data=api.upload(ROW)["id"])
    phases = [{"type": "phase", "phase": name} for name in ("loading", "training")]
    api.tell(token, *phases, {"type": "checkpoint", "step": 2, "path": "x"})
    while exporter.turn():  # jobs of other tests, should they have ended meanwhile
        pass
    assert job_id.encode() not in b"".join(body for _, _, body in collector.seen), "it runs"
    collector.seen.clear()
    api.end(token, Requeued("the worker leaves"))
    token = api.go_on(job_id)
    api.tell(token, phases[1])
    api.end(token, Succeeded({"steps": 3}, []))
    assert exporter.turn() == 1 and exporter.turn() == 0 and len(collector.seen) == 1
    root, *rest = told(collector)
    about = {one.key: one.value for one in root.attributes}
    assert (root.name, root.parent_span_id, root.status.code) == ("traced", b"", 1)
    assert about["eft.job.id"].string_value == job_id and about["eft.attempts"].int_value == 3
    assert [one.name for one in root.events] == ["checkpoint"]
    assert len(root.trace_id) == 16 and len({one.span_id for one in (root, *rest)}) == len(rest) + 1
    by_id = {one.span_id: one for one in (root, *rest)}
    for one in rest:
        parent = by_id[one.parent_span_id]
        assert one.trace_id == root.trace_id and len(one.span_id) == 8
        slack = 1_000_000_000  # a trainer's clock and the database's are two
        assert parent.start_time_unix_nano - slack <= one.start_time_unix_nano <= one.end_time_unix_nano
        assert one.end_time_unix_nano <= parent.end_time_unix_nano + slack
        track = {attribute.key: attribute.value.string_value for attribute in one.attributes}["eft.track"]
        assert (parent is root) is (track != "phases"), "phases lie in their attempt"
    assert [one.name for one in rest if by_id[one.parent_span_id] is not root] == ["loading", "training", "training"]
    with api.database.read() as session:
        created, finished = session.query(Job.created_at, Job.finished_at).filter(Job.id == job_id).one()
    assert root.start_time_unix_nano == pytest.approx(created * 1e9, abs=2000)
    assert root.end_time_unix_nano == pytest.approx(finished * 1e9, abs=1e9)


def test_a_collector_that_is_away_gets_it_later_and_one_that_refuses_it_never_again(
    api: Any, collector: Collector, exporter: TraceExporter, caplog: pytest.LogCaptureFixture
) -> None:
    _, token = api.start_job(name="lost", data=api.upload(ROW)["id"])
    api.end(token, Failed("user", "bad_rows", "row 3 has no answer"))
    collector.answers = [503, 200]
    with pytest.raises(Away, match="503"):
        exporter.turn()
    assert exporter.turn() == 1 and exporter.turn() == 0
    first, second = (body for _, _, body in collector.seen)
    assert first == second, "the same ids, so that nothing is there twice"
    assert (told(collector)[0].status.code, told(collector)[0].status.message) == (2, "row 3 has no answer")
    refused, token = api.start_job(name="refused", data=api.upload(ROW)["id"])
    api.end(token, Succeeded({"steps": 1}, []))
    collector.answers = [400]
    assert exporter.turn() == 1 and exporter.turn() == 0
    assert f"refused the trace of {refused} for good: 400" in caplog.text
