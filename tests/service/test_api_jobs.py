"""Submitting, listing, showing and cancelling jobs, and everything that is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from core.db.tables import IdempotencyKey, Job, OutboxMessage
from core.plan.compatibility import cells
from core.plan.rules.table import Rule


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT = jsonl([{"messages": [{"role": "user", "content": "on"}, {"role": "assistant", "content": "lamp.on"}]}])
PAIRS = jsonl([{"prompt": "off", "completion": "lamp.off"}])
TEXT = jsonl([{"text": "once upon a time"}])


@pytest.fixture
def chat(api: Any) -> str:
    return str(api.upload(CHAT)["id"])


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()["error"]
    assert set(found) - {"faults"} == {"code", "message", "field", "request_id"}
    assert found["request_id"] == reply.headers["x-request-id"]
    return found


@pytest.mark.both_databases
def test_short_forms_are_resolved_and_the_job_waits(api: Any, chat: str) -> None:
    held_out = api.upload(PAIRS)["id"]
    spec = {"name": "lamps", "model": MODEL, "data": {"train": chat, "eval": held_out}, "method": "full"}
    reply = api.http.post("/jobs", json=spec)
    assert reply.status_code == 201
    job = reply.json()
    assert reply.headers["location"] == job["links"]["self"] == f"/jobs/{job['id']}"
    assert (job["name"], job["status"], job["attempt"], job["node"]) == ("lamps", "queued", 0, None)
    assert job["created_at"].endswith("Z")
    assert job["started_at"] is job["finished_at"] is job["result"] is job["failure"] is job["progress"] is None
    resolved = job["spec"]
    assert resolved["method"] == {"type": "full", "train": None}
    assert resolved["optimizer"]["learning_rate"] == 2e-5
    assert resolved["stage"] == {"type": "sft", "loss": "nll", "loss_on": "completions"}
    assert resolved["evaluation"]["type"] == "held_out"
    assert resolved["data"]["train"] == {"type": "file", "id": chat, "format": "messages", "columns": {}}
    assert resolved["data"]["eval"]["format"] == "prompt_completion"
    shown = api.http.get(f"/jobs/{job['id']}").json()
    assert shown["queue"]["reason"] and shown | {"queue": None, "notices": job["notices"]} == job
    with api.database.read() as session:
        row = session.execute(select(Job).where(Job.id == job["id"])).scalar_one()
        assert row.request_id == reply.headers["x-request-id"]
        assert session.execute(select(OutboxMessage).where(OutboxMessage.job_id == job["id"])).one()


@pytest.mark.parametrize("media_type", ["application/yaml", "text/yaml", "application/x-yaml; charset=utf-8"])
def test_yaml(api: Any, chat: str, media_type: str) -> None:
    text = f"model: {MODEL}\ndata: {chat}\noptimizer:\n  type: adamw\n  learning_rate: 1e-4\n"
    reply = api.http.post("/jobs?dry_run=true", content=text, headers={"content-type": media_type})
    assert reply.status_code == 200
    assert reply.json()["spec"]["optimizer"]["learning_rate"] == 1e-4


def test_dry_run_stores_nothing(api: Any, chat: str) -> None:
    client = api.client("dry")
    own = api.upload(CHAT, client=client)["id"]
    reply = client.post("/jobs?dry_run=true", json={"model": MODEL, "data": own}, headers={"idempotency-key": "d"})
    assert reply.status_code == 200
    assert reply.json()["dry_run"] is True
    assert client.get("/jobs").json() == {"data": [], "has_more": False, "next": None}
    again = client.post("/jobs?dry_run=true", json=reply.json()["spec"])
    assert again.json() == reply.json()  # resolving twice changes nothing
    with api.database.read() as session:
        assert session.execute(select(IdempotencyKey).where(IdempotencyKey.key == "d")).all() == []


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    # changes to a good spec, code, field, words of the message
    ({"training": {"num_train_epochs": -1}}, "invalid_spec", "training.num_train_epochs", "greater than 0"),
    ({"training": {"num_train_epochs": 0}}, "invalid_spec", "training.num_train_epochs", "greater than 0"),
    ({"optimizer": {"type": "adamw", "learning_rate": float("nan")}}, "invalid_spec", "optimizer.learning_rate", "NaN"),
    (
        {"optimizer": {"type": "adamw", "learning_rate": float("inf")}},
        "invalid_spec",
        "optimizer.learning_rate",
        "finit",
    ),
    ({"optimizer": {"type": "adamw", "learning_rate": "1e-4"}}, "invalid_spec", "optimizer.learning_rate", "number"),
    ({"optimizer": {"type": "adamw", "learning_rate": True}}, "invalid_spec", "optimizer.learning_rate", "number"),
    ({"method": "lorra"}, "invalid_spec", "method.type", "did you mean `lora`?"),
    ({"methd": "lora"}, "invalid_spec", "methd", "did you mean `method`?"),
    ({"method": {"type": "lora", "rank": 8}}, "invalid_spec", "method.rank", "`r`"),
    ({"method": {"type": "lora", "r": 0}}, "invalid_spec", "method.r", "greater than or equal to 1"),
    ({"stage": "dpoo"}, "invalid_spec", "stage.type", "did you mean `dpo`"),
    ({"stage": "dpo"}, "rows_of_another_stage", "data.train", "preference"),
    ({"optimizer": "adam"}, "invalid_spec", "optimizer.type", "did you mean `adamw`?"),
    ({"quantization": "int4"}, "invalid_spec", "quantization.type", "nf4"),
    ({"version": 2}, "invalid_spec", "version", "`1`"),
    ({"model": "no such id!"}, "invalid_spec", "model.id", "hub id"),
    ({"model": "a/b\u202e"}, "invalid_spec", "model.id", "\\u202e"),
    ({"model": {"type": "ollama", "id": "x"}}, "invalid_spec", "model.type", "hub"),
    ({"model": {"type": "gguf", "id": "a/b"}}, "invalid_spec", "model", "gguf"),
    ({"name": "../../etc/passwd"}, "invalid_spec", "name", "letters"),
    ({"name": "a\x00b"}, "invalid_spec", "name", "\\u0000"),
    ({"name": "tr\u0430in"}, "invalid_spec", "name", "letters"),  # a Cyrillic a
    ({"name": "x" * 101}, "invalid_spec", "name", "100"),
    ({"name": "\ud800"}, "invalid_spec", "name", "string"),
    ({"data": "file-nope"}, "invalid_spec", "data.train.id", "POST /files"),
    ({"model": "/etc"}, "path_not_allowed", "model.path", "EFT_MODEL_ROOTS"),
    ({"model": "./model.gguf"}, "path_not_allowed", "model.path", "EFT_MODEL_ROOTS"),
    ({"data": "/etc/passwd"}, "path_not_allowed", "data.train.path", "EFT_DATA_ROOTS"),
    ({"evaluation": "held_out"}, "nothing_held_out", "evaluation", "data.eval"),
]


@pytest.mark.parametrize(("change", "code", "field", "words"), BAD)
def test_bad_specs_name_the_field_and_the_way_out(
    api: Any, chat: str, change: dict[str, Any], code: str, field: str, words: str
) -> None:
    body = json.dumps({"model": MODEL, "data": chat, **change})  # NaN goes out as NaN
    found = error(api.http.post("/jobs", content=body, headers={"content-type": "application/json"}), 422)
    assert (found["code"], found["field"]) == (code, field)
    assert words in found["message"]
    assert found["message"].isprintable()
    assert found["faults"][0]["field"] == field


REFUSED = [(values, rule) for values, refused in cells("batching", "truncation", "streaming") for rule in refused]


@pytest.mark.parametrize(("cell", "rule"), REFUSED, ids=[values["batching"] for values, _ in REFUSED])
def test_refused_cells_of_the_batches(api: Any, chat: str, cell: dict[str, str], rule: Rule) -> None:
    grouped = cell["batching"] == "rows by length"
    spec = {
        "model": MODEL,
        "data": {"train": chat, "streaming": cell["streaming"] == "yes"},
        "batching": {"type": "rows", "group_by_length": True} if grouped else cell["batching"],
        "training": {"truncation": cell["truncation"], "max_steps": 3},
    }
    found = error(api.http.post("/jobs", json=spec), 422)
    assert (found["code"], found["field"]) == (rule.code, rule.field) and rule.reason in found["message"]


def test_every_wrong_field_has_its_fault(api: Any, chat: str) -> None:
    spec = {"model": MODEL, "data": chat, "training": {"max_length": 1, "seed": -1}, "nam": "x"}
    found = error(api.http.post("/jobs", json=spec), 422)
    assert [fault["field"] for fault in found["faults"]] == ["training.max_length", "training.seed", "nam"]
    assert "(and 2 more)" in found["message"]


DOCUMENTS = [
    ("application/json", b"", "invalid_json"),
    ("application/json", b"{", "invalid_json"),
    ("application/json", b'{"model": "a/b", "model": "c/d"}', "invalid_json"),
    ("application/json", b"[" * 100_000, "invalid_json"),
    ("application/json", b"\xff\xfe\xfd", "invalid_json"),
    ("application/json", b"9" * 5000, "invalid_json"),
    ("application/json", b"[]", "invalid_spec"),
    ("application/json", b"null", "invalid_spec"),
    ("application/yaml", b"model: a\nmodel: b", "invalid_yaml"),
    ("application/yaml", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "invalid_yaml"),
    ("application/yaml", b"a: !!python/object/apply:os.system [id]", "invalid_yaml"),
    ("application/yaml", b"[" * 5000, "invalid_yaml"),
    ("application/yaml", b"a: !!float ''", "invalid_yaml"),
    ("application/yaml", b"? [a]\n: b", "invalid_yaml"),
    ("application/yaml", b"a\x00b: c", "invalid_yaml"),
    ("application/yaml", b"name: 2026-01-01", "invalid_value"),
    ("application/yaml", b"seed: 0x" + b"f" * 5000, "invalid_value"),
    ("application/yaml", b"", "invalid_spec"),
]


@pytest.mark.parametrize(("media_type", "body", "code"), DOCUMENTS)
def test_broken_documents(api: Any, media_type: str, body: bytes, code: str) -> None:
    headers = {"content-type": media_type, "idempotency-key": "broken"}
    found = error(api.http.post("/jobs", content=body, headers=headers), 422)
    assert found["code"] == code


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_other_media_types(api: Any, media_type: str) -> None:
    found = error(api.http.post("/jobs", content=b"{}", headers={"content-type": media_type}), 415)
    assert "application/json" in found["message"]


def test_a_spec_of_10_mb_is_refused_unread(api: Any) -> None:
    spec = json.dumps({"model": MODEL, "data": "x" * (10 << 20)}).encode()
    headers = {"content-type": "application/json"}
    assert error(api.http.post("/jobs", content=spec, headers=headers), 413)["code"] == "too_large"

    def chunks() -> Iterator[bytes]:  # no Content-Length to go by
        yield from (spec[at : at + 65536] for at in range(0, len(spec), 65536))

    assert error(api.http.post("/jobs", content=chunks(), headers=headers), 413)["code"] == "too_large"
    yaml = {"content-type": "application/yaml"}
    began = time.monotonic()
    assert error(api.http.post("/jobs", content=b"a: 1\n" * 100_000, headers=yaml), 413)["code"] == "too_large"
    assert time.monotonic() - began < 20
    assert api.http.get("/jobs", params={"limit": 1}).status_code == 200  # the connection is still good


def test_formats_come_from_the_file(api: Any, chat: str) -> None:
    def post(**spec: Any) -> httpx.Response:
        reply: httpx.Response = api.http.post("/jobs?dry_run=true", json={"model": MODEL, **spec})
        return reply

    named = {"type": "file", "id": chat}
    assert post(data={"train": {**named, "format": "messages"}}).status_code == 200
    found = error(post(data={"train": {**named, "format": "text"}}), 422)
    assert (found["code"], found["field"]) == ("format_mismatch", "data.train.format")
    text = api.upload(TEXT)["id"]
    assert post(data=text).json()["spec"]["stage"]["loss_on"] == "all"
    found = error(post(data=text, stage={"type": "sft", "loss": "nll", "loss_on": "completions"}), 422)
    assert (found["code"], found["field"]) == ("no_completions", "stage.loss_on")
    assert error(post(data={"train": chat, "eval": text}), 422)["code"] == "no_completions_in_eval"
    assert error(post(data={"train": chat, "eval": chat}), 422)["code"] == "same_rows"
    assert error(post(data={"train": chat, "eval": api.upload(PAIRS)["id"]}, evaluation="none"), 422)["code"] == (
        "eval_unused"
    )


def test_a_missing_and_a_foreign_file_read_the_same(api: Any) -> None:
    foreign = api.upload(CHAT, client=api.client("others"))["id"]
    missing = "file-" + "0" * 26
    messages = []
    for train, held_out, field in [(foreign, None, "data.train"), (missing, None, "data.train")]:
        found = error(api.http.post("/jobs", json={"model": MODEL, "data": {"train": train, "eval": held_out}}), 422)
        assert (found["code"], found["field"]) == ("file_not_found", field)
        messages.append(found["message"].replace(train, "FILE"))
    assert messages[0] == messages[1]
    own = api.upload(CHAT)["id"]
    found = error(api.http.post("/jobs", json={"model": MODEL, "data": {"train": own, "eval": foreign}}), 422)
    assert found["field"] == "data.eval"


@pytest.mark.both_databases
def test_lists_are_filtered_and_paged(api: Any) -> None:
    client = api.client("pages")
    data = api.upload(CHAT, client=client)["id"]
    ids = [api.submit(client, data=data, name=f"job {number % 2}")["id"] for number in range(5)]
    client.post(f"/jobs/{ids[0]}/cancel")
    newest = ids[::-1]

    def listed(**params: Any) -> list[str]:
        return [job["id"] for job in client.get("/jobs", params=params).json()["data"]]

    assert listed() == newest
    assert listed(status="cancelled") == [ids[0]]
    assert listed(status=["cancelled", "queued"]) == newest
    assert listed(name="job 1") == [ids[3], ids[1]]
    since = client.get(f"/jobs/{ids[2]}").json()["created_at"]
    assert listed(created_after=since) == newest[:2]
    seen: list[str] = []
    page = client.get("/jobs", params={"limit": 2}).json()
    while True:
        seen += [job["id"] for job in page["data"]]
        if not page["has_more"]:
            break
        page = client.get("/jobs", params={"limit": 2, "after": page["next"]}).json()
    assert seen == newest
    assert page["next"] is None
    foreign = api.submit()["id"]
    for after in (foreign, "job-" + "0" * 26, "nonsense"):
        assert error(client.get("/jobs", params={"after": after}), 400)["code"] == "unknown_cursor"
    found = error(client.get("/jobs", params={"status": "canceled"}), 422)
    assert "did you mean `cancelled`?" in found["message"]
    for params in ({"limit": 0}, {"limit": 201}, {"created_after": "soon"}, {"after": "\x00"}, {"name": "\x00"}):
        assert error(client.get("/jobs", params=params), 422)["field"] == next(iter(params))


@pytest.mark.both_databases
def test_lists_leave_specs_out(api: Any) -> None:
    """A page of them is small, whatever people have written into their specs."""
    client = api.client("long specs")
    data = {
        "train": api.upload(CHAT, client=client)["id"],
        "rendering": {"type": "model", "system_prompt": "x" * 50_000},
    }
    job_id = api.submit(client, data=data)["id"]
    page = client.get("/jobs")
    assert len(page.content) < 5_000 and page.json()["data"][0]["spec"] is None
    shown = client.get(f"/jobs/{job_id}").json()
    assert shown["spec"]["data"]["rendering"]["system_prompt"] == "x" * 50_000
    assert shown["submitted"]["data"] == data, "as it was sent, without a default"
    assert page.json()["data"] == [shown | {"spec": None, "submitted": None, "queue": None}]


@pytest.mark.both_databases
def test_cancel_is_idempotent_and_final(api: Any) -> None:
    job = api.submit()
    first = api.http.post(f"/jobs/{job['id']}/cancel")
    second = api.http.post(f"/jobs/{job['id']}/cancel")
    assert first.status_code == second.status_code == 200
    assert first.json() == second.json()
    assert first.json()["status"] == "cancelled"
    assert first.json()["finished_at"] is not None


def test_paths_must_lie_below_the_roots(start_api: Any, tmp_path: Any) -> None:
    roots = {name: tmp_path / name for name in ("models", "rows", "elsewhere")}
    for folder in roots.values():
        folder.mkdir()
    (roots["models"] / "tiny").mkdir()
    (roots["models"] / "sly").symlink_to(roots["elsewhere"])
    (roots["rows"] / "train.jsonl").write_bytes(CHAT)
    (roots["rows"] / "sly.jsonl").symlink_to("/etc/passwd")
    with start_api(model_roots=roots["models"], data_roots=roots["rows"]) as api:

        def answer(model: str, data: str) -> tuple[int, str | None, str | None]:
            reply = api.http.post("/jobs?dry_run=true", json={"model": model, "data": data})
            found = reply.json().get("error", {})
            return reply.status_code, found.get("code"), found.get("field")

        train = str(roots["rows"] / "train.jsonl")
        tiny = str(roots["models"] / "tiny")
        assert answer(tiny, train) == (200, None, None)
        same = {"model": tiny, "data": {"train": train, "eval": f"{roots['rows']}/../rows/train.jsonl"}}
        assert error(api.http.post("/jobs", json=same), 422)["code"] == "same_rows"
        assert answer(f"{tiny}/../tiny", train) == (200, None, None)
        for model in ("sly", "../elsewhere", "..", "tiny/../../elsewhere"):
            assert answer(f"{roots['models']}/{model}", train) == (422, "path_not_allowed", "model.path")
        assert answer(str(tmp_path / "models-too"), train) == (422, "path_not_allowed", "model.path")
        assert answer("./tiny", train) == (422, "path_not_allowed", "model.path")
        assert answer(f"{tiny}/gone", train) == (422, "path_not_found", "model.path")
        assert answer(f"{tiny}/gone.gguf", train) == (422, "path_not_found", "model.path")
        assert answer(tiny, str(roots["rows"] / "sly.jsonl")) == (422, "path_not_allowed", "data.train.path")


def test_no_room_on_the_disk(start_api: Any) -> None:
    with start_api() as api:
        data = api.upload(CHAT)["id"]
        first = api.http.post("/jobs", json={"model": MODEL, "data": data}, headers={"idempotency-key": "early"})
        key = api.key
    with start_api(min_free_bytes=1 << 60) as api:
        client = api.with_key(key)
        assert error(client.post("/jobs", json={"model": MODEL, "data": data}), 507)["code"] == "no_space"
        again = client.post("/jobs", json={"model": MODEL, "data": data}, headers={"idempotency-key": "early"})
        assert (again.status_code, again.json()) == (201, first.json())  # nothing new is stored
        assert client.post("/jobs?dry_run=true", json={"model": MODEL, "data": data}).status_code == 200
        assert client.post(f"/jobs/{first.json()['id']}/cancel").status_code == 200
        assert client.delete(f"/files/{data}").status_code == 200
        found = error(api.http.post("/files", files={"file": ("a.jsonl", CHAT)}), 507)
        assert found["code"] == "no_space"
        assert "EFT_MIN_FREE_BYTES" in found["message"]
        assert list(api.layout.uploads.iterdir()) == list(api.layout.files.iterdir()) == []
