"""Server-sent events: replay, follow, end; and nothing left of a watcher who has gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.jobs.lifecycle.finish import Succeeded

ROW = b'{"prompt": "off", "completion": "lamp.off"}\n'


NOTICE = {"type": "notice", "code": "x", "message": "Grüße\nα"}


def start(api: Any) -> tuple[str, Any]:
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    return job_id, token


def done(api: Any, token: Any) -> None:
    api.end(token, Succeeded({"steps": 3}))


class Stream:
    """Reads a stream in a thread; `events` grows as they come."""

    def __init__(self, api: Any, job_id: str, headers: dict[str, str] | None = None, **params: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self._client = httpx.Client(base_url=api.url, headers=dict(api.http.headers), timeout=30)
        self._arguments = (f"/jobs/{job_id}/events", params, headers or {})
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        path, params, headers = self._arguments
        with self._client, self._client.stream("GET", path, params=params, headers=headers) as reply:
            self.status = reply.status_code
            assert reply.headers["content-type"] == "text/event-stream"
            for event in parse(reply.iter_lines()):
                self.events.append(event)

    def wait(self, count: int, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while len(self.events) < count:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.02)

    def ids(self) -> list[str | None]:
        return [event.get("id") for event in self.events]


def parse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value


@pytest.mark.both_databases
def test_replay_follow_and_end(api: Any) -> None:
    job_id, token = start(api)
    early = Stream(api, job_id)
    early.wait(5)  # queued, preparing, queued, starting, running
    assert early.ids() == ["1", "2", "3", "4", "5"]
    assert [event["data"]["data"]["to"] for event in early.events] == [
        "queued", "preparing", "queued", "starting", "running",
    ]  # fmt: skip
    api.tell(token, {"type": "phase", "phase": "loading"}, NOTICE)
    early.wait(7)
    assert early.events[6]["event"] == "notice"
    assert early.events[6]["data"] == {
        "seq": 7,
        "type": "notice",
        "time": early.events[6]["data"]["time"],
        "attempt": 2,
        "data": {"code": "x", "message": "Grüße\nα"},
    }
    late = Stream(api, job_id, after=5)
    again = Stream(api, job_id, headers={"last-event-id": "6"})
    late.wait(2)
    again.wait(1)
    done(api, token)
    for stream in (early, late, again):
        stream.thread.join(90)
        assert not stream.thread.is_alive()
        assert stream.events[-1] == {"event": "end", "data": {"status": "succeeded"}}
    assert early.ids() == ["1", "2", "3", "4", "5", "6", "7", "8", None]
    assert late.ids() == ["6", "7", "8", None]
    assert again.ids() == ["7", "8", None]
    finished = Stream(api, job_id)  # all of it, and the end, without waiting
    finished.thread.join(90)
    assert finished.events == early.events
    beyond = Stream(api, job_id, after=8)
    beyond.thread.join(90)
    assert [event["event"] for event in beyond.events] == ["end"]


@pytest.mark.both_databases
def test_pages_of_events(api: Any) -> None:
    job_id, token = start(api)
    api.tell(token, *[NOTICE] * 20)
    page = api.http.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 10}).json()
    assert [event["seq"] for event in page["data"]] == list(range(1, 11))
    assert (page["has_more"], page["next"]) == (True, 10)
    rest = api.http.get(f"/jobs/{job_id}/events", params={"after": 10}, headers={"accept": "application/json"}).json()
    assert [event["seq"] for event in rest["data"]] == list(range(11, 26))
    assert (rest["has_more"], rest["next"]) == (False, 25)
    assert api.http.get(f"/jobs/{job_id}/events", params={"format": "json", "after": 25}).json() == {
        "data": [],
        "has_more": False,
        "next": None,
    }
    for bad in ("x", "-1", "1e3", "9" * 20):
        assert api.http.get(f"/jobs/{job_id}/events", headers={"last-event-id": bad}).status_code == 422
    done(api, token)


def test_a_long_history_is_replayed_whole(api: Any) -> None:
    job_id, token = start(api)
    follower = Stream(api, job_id)
    follower.wait(5)
    for _ in range(4):  # more than the hub keeps
        api.tell(token, *[NOTICE] * 600)
    latecomer = Stream(api, job_id)
    done(api, token)
    for stream in (follower, latecomer):
        stream.thread.join(200)
        assert stream.ids() == [str(number) for number in range(1, 2407)] + [None]


def followers(api: Any) -> int:
    return int(httpx.get(f"{api.url}/readyz").json()["followers"])


@pytest.mark.parametrize("count", [30])
def test_nothing_is_left_of_those_who_leave(api: Any, count: int) -> None:
    job_id, token = start(api)
    before = followers(api)  # of other tests, whose clients are still open
    clients = [httpx.Client(base_url=api.url, headers=dict(api.http.headers), timeout=60) for _ in range(count)]
    replies = [client.send(client.build_request("GET", f"/jobs/{job_id}/events"), stream=True) for client in clients]
    lines = [reply.iter_lines() for reply in replies]
    assert {next(line) for line in lines} == {"id: 1"}
    assert followers(api) >= count
    for reply, client in zip(replies, clients, strict=True):
        reply.close()
        client.close()
    deadline = time.monotonic() + 90
    while followers(api) > before:
        assert time.monotonic() < deadline, followers(api)
        time.sleep(0.05)
    after = Stream(api, job_id)  # the hub begins anew
    after.wait(5)
    done(api, token)
    after.thread.join(90)
    assert after.events[-1]["event"] == "end"


def test_a_server_that_stops_ends_its_streams(start_api: Any) -> None:
    with start_api() as api:
        job_id, _ = start(api)
        streams = [Stream(api, job_id) for _ in range(5)]
        for stream in streams:
            stream.wait(5)
        api.stop()
        for stream in streams:
            stream.thread.join(90)
            assert not stream.thread.is_alive()
            assert stream.events[-1]["event"] == "status"  # no `end`: the job goes on
        assert "Traceback" not in api.log()
        assert "shutdown exceeded" not in api.log(), "nobody had to be cut off after uvicorn's ten seconds"
