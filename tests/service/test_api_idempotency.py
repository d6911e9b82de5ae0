"""A retried POST makes no second job."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from core.db.tables import IdempotencyKey

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROW = b'{"prompt": "off", "completion": "lamp.off"}\n'


def post(client: httpx.Client, key: str | bytes, data: str, **spec: Any) -> httpx.Response:
    return client.post(
        "/jobs",
        json={"model": MODEL, "data": data, **spec},
        headers={b"idempotency-key": key.encode() if isinstance(key, str) else key},
    )


@pytest.mark.both_databases
def test_the_same_answer_again(api: Any) -> None:
    data = api.upload(ROW)["id"]
    first, second = post(api.http, "k-1", data), post(api.http, "k-1", data)
    assert first.status_code == second.status_code == 201
    assert first.json() == second.json()
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["location"] == first.headers["location"]
    # The answer of then, even when the job has moved on.
    api.http.post(f"/jobs/{first.json()['id']}/cancel")
    assert post(api.http, "k-1", data).json() == first.json()


def test_another_body_is_refused(api: Any) -> None:
    data = api.upload(ROW)["id"]
    assert post(api.http, "k-2", data).status_code == 201
    reply = post(api.http, "k-2", data, name="other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.both_databases
def test_bodies_are_compared_as_json(api: Any) -> None:
    """White space, the order of fields and the notation make no other request."""
    data = api.upload(ROW)["id"]
    body = {"model": MODEL, "data": data, "optimizer": {"type": "adamw", "learning_rate": 1e-4}}
    written = [
        (json.dumps(body), "application/json"),
        (
            json.dumps(dict(reversed(body.items())), indent=2).replace("0.0001", "1e-4"),
            "application/json; charset=utf8",
        ),
        (f"model: {MODEL}\ndata: {data}\noptimizer: {{type: adamw, learning_rate: 0.0001}}\n", "application/yaml"),
    ]
    replies = [
        api.http.post("/jobs", content=text, headers={"idempotency-key": "k-same", "content-type": kind})
        for text, kind in written
    ]
    assert [reply.status_code for reply in replies] == [201] * 3, [reply.text for reply in replies]
    assert [reply.headers.get("idempotency-replayed") for reply in replies] == [None, "true", "true"]
    assert len({reply.text for reply in replies}) == 1
    one, other = written[0][0].replace("0.0001", "0.0002"), written[0][0].replace(data, f"{data} ")
    for text in (one, other):
        headers = {"idempotency-key": "k-same", "content-type": "application/json"}
        reply = api.http.post("/jobs", content=text, headers=headers)
        assert reply.json()["error"]["code"] == "idempotency_key_reused", reply.text


def test_a_spec_is_stored_once(api: Any) -> None:
    data = {"train": api.upload(ROW)["id"], "rendering": {"type": "model", "system_prompt": "x" * 60_000}}
    first = post(api.http, "k-once", data).json()
    assert len(json.dumps(first)) > 60_000
    with api.database.read() as session:
        row = session.execute(select(IdempotencyKey).where(IdempotencyKey.key == "k-once")).scalar_one()
    assert row.body["id"] == first["id"] and len(json.dumps(row.body)) < 3000
    assert post(api.http, "k-once", data).json() == first


def test_a_refusal_does_not_use_the_key_up(api: Any) -> None:
    data = api.upload(ROW)["id"]
    assert post(api.http, "k-3", data, method="nope").status_code == 422
    assert post(api.http, "k-3", data).status_code == 201


def test_keys_belong_to_a_project(api: Any) -> None:
    other = api.client("idempotency-other")
    mine = post(api.http, "k-4", api.upload(ROW)["id"])
    theirs = post(other, "k-4", api.upload(ROW, client=other)["id"])
    assert mine.status_code == theirs.status_code == 201
    assert mine.json()["id"] != theirs.json()["id"]


def test_malformed_keys(api: Any) -> None:
    data = api.upload(ROW)["id"]
    for key in ("", "x" * 256, "tab\there", b"caf\xe9"):
        reply = post(api.http, key, data)
        assert (reply.status_code, reply.json()["error"]["field"]) == (422, "idempotency-key"), key


@pytest.mark.both_databases
def test_many_at_once_make_one_job(api: Any) -> None:
    client = api.client("idempotency-race")
    data = api.upload(ROW, client=client)["id"]
    for round_number in range(3):
        barrier = threading.Barrier(8)
        replies: list[httpx.Response] = []

        def send(key: str, barrier: threading.Barrier, replies: list[httpx.Response]) -> None:
            own = httpx.Client(base_url=api.url, headers=dict(client.headers), timeout=30)
            with own:
                barrier.wait()
                replies.append(post(own, key, data))

        threads = [threading.Thread(target=send, args=(f"race-{round_number}", barrier, replies)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in replies] == [201] * 8
        assert len({reply.json()["id"] for reply in replies}) == 1
        assert sum("idempotency-replayed" not in reply.headers for reply in replies) == 1
    assert len(client.get("/jobs").json()["data"]) == 3
