"""Sessions over HTTP: a recipe that a kill of anything disturbs, and its weights to the bit; parking; bad requests."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from eft.errors import ApiError, OperationFailed
from eft.sync.client import Client
from eft.sync.sessions import TrainingSession
from sqlalchemy import update

from core.db.engine import db_now
from core.db.tables import Job, SessionOperation, SessionRow
from core.jobs.lifecycle.sessions import idle, log
from core.spec.session import tensors
from tests.support.service import Service, running, wait_for
from tests.support.world import Caller, World

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42], list(range(60, 80))]
METHOD = {"type": "lora", "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.1}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {"EFT_MODEL_ROOTS": str(models), "EFT_RETRY_BACKOFF_SECONDS": "0.05"}
    yield from running(tmp_path_factory.mktemp("sessions"), environment, settle=0)


def turn(session: TrainingSession, model: str, number: int) -> np.ndarray[Any, Any]:
    session.forward_backward([{"tokens": ROWS[number % 3]}], model=model)
    session.forward_backward([{"tokens": ROWS[(number + 1) % 3]}], model=model)
    session.step(0.01, max_grad_norm=0.5, model=model)
    found: np.ndarray[Any, Any] = session.logprobs([{"tokens": row} for row in ROWS], model=model).arrays["logprobs"]
    return found


def children(service: Service, session_id: str) -> list[int]:
    words = f"-m core.train.session {service.data}/runs/{session_id}"
    return [pid for pid, command in service.processes().items() if words in command]


def test_a_session_may_train_the_model_itself(service: Service, models: Path) -> None:
    """With `method: full` it learns, goes on to the bit after kill -9, and refuses a second model; dropped, the base
    has the weights of its files again."""
    client = Client(service.note()["url"], service.key, patience=120)
    spec = {"precision": "fp32", "resources": {"accelerator": "cpu"}}
    with client.session(model=str(models / "tiny"), method="full", **spec) as session:
        found = [turn(session, "default", number) for number in (0, 1)]
        (child,) = children(service, session.id)
        os.kill(child, signal.SIGKILL)
        found.append(turn(session, "default", 2))
        with pytest.raises(OperationFailed, match="one owner"):
            session.create("another", {"type": "full"})
        session.ask({"op": "drop", "model": "default"})
        session.create("default", {"type": "full"})
        again = [turn(session, "default", number) for number in (0, 1, 2)]
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
    assert not np.array_equal(found[0], found[2])


def test_a_recipe_ends_with_the_undisturbed_bits_whatever_is_killed(service: Service, models: Path) -> None:
    """kill -9 of the child within a window, of the worker, and of the API; then the session is parked and comes back.
    The same recipe on another adapter, left alone, gives the same bits at every step."""
    client = Client(service.note()["url"], service.key, patience=120)
    spec = {"precision": "fp32", "resources": {"accelerator": "cpu"}, "idle_seconds": 4.0}
    with client.session(model=str(models / "tiny"), method=None, **spec) as session:
        session.create("struck", METHOD, seed=7)
        struck = [turn(session, "struck", 0)]
        session.forward_backward([{"tokens": ROWS[2]}], model="struck")
        session.zero_grad(model="struck")
        session.forward_backward([{"tokens": ROWS[1]}], model="struck")
        (child,) = children(service, session.id)
        os.kill(child, signal.SIGKILL)
        session.forward_backward([{"tokens": ROWS[2]}], model="struck")
        session.step(0.01, max_grad_norm=0.5, model="struck")
        struck.append(session.logprobs([{"tokens": row} for row in ROWS], model="struck").arrays["logprobs"])
        worker = service.pid("worker")
        os.kill(worker, signal.SIGKILL)
        struck.append(turn(session, "struck", 2))
        os.kill(service.pid("api"), signal.SIGKILL)
        struck.append(turn(session, "struck", 3))
        session.create("calm", METHOD, seed=7)
        calm = [turn(session, "calm", 0)]
        session.forward_backward([{"tokens": ROWS[2]}], model="calm")
        session.zero_grad(model="calm")
        calm += [turn(session, "calm", number) for number in (1, 2, 3)]
        assert all(np.array_equal(one, other) for one, other in zip(struck, calm, strict=True))
        assert not np.array_equal(struck[0], struck[1])
        wait_for(lambda: session.status()["status"] == "parked", 60, "the session to be parked")
        assert not children(service, session.id)
        again = session.logprobs([{"tokens": row} for row in ROWS], model="struck").arrays["logprobs"]
        assert np.array_equal(again, struck[-1])
        saved = [Path(session.save(name, model=name).values["folder"]) for name in ("struck", "calm")]
        one, other = ((folder / "state.safetensors").read_bytes() for folder in saved)
        assert one == other
        with pytest.raises(OperationFailed) as failed:
            session.forward_backward([{"tokens": [1, 99_999]}], model="struck")
        assert failed.value.field == "tokens"
        log = service.client.get(f"/sessions/{session.id}/operations/1").json()
        assert log["status"] == "done" and log["operation"]["op"] == "create"
        parked = client.sessions.park(session.id[:20])
        assert parked["status"] in ("parking", "parked") and parked["id"] == session.id
        wait_for(lambda: session.status()["status"] == "parked", 60, "the session to leave its slot")
        again = session.logprobs([{"tokens": row} for row in ROWS], model="struck").arrays["logprobs"]
        assert np.array_equal(again, struck[-1]), "it comes back as it was"
    assert client.sessions.get("last")["status"] in ("closing", "closed")
    client.close()


def test_sessions_of_one_base_share_a_process_and_its_end(service: Service, models: Path) -> None:
    """There is one slot. Three sessions take turns in one process, each to the bits that it has alone, while that is
    killed by kill -9 and its host closed; a guest that nobody uses is parked, and comes back."""
    client = Client(service.note()["url"], service.key, patience=120)
    spec = {"model": str(models / "tiny"), "method": None, "precision": "fp32", "resources": {"accelerator": "cpu"}}
    names = ["one", "two", "three"]

    def shared(*others: TrainingSession) -> None:
        wait_for(lambda: all(one.status()["status"] == "running" for one in others), 120, "all to run")
        assert len([pid for one in others for pid in children(service, one.id)]) == 1

    with client.session(**spec) as calm:
        for name in names:
            calm.create(name, METHOD, seed=len(name))
        expected = {name: [turn(calm, name, number) for number in range(6)] for name in names}
    stack = ExitStack()
    sessions = {name: stack.enter_context(client.session(**spec, idle_seconds=600.0)) for name in names}
    found: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in names}

    def work(number: int, which: list[str]) -> None:
        for name in which:
            found[name].append(turn(sessions[name], name, number))

    for name in names:
        sessions[name].create(name, METHOD, seed=len(name))
    work(0, names)
    shared(*sessions.values())
    hosts = [name for name in names if children(service, sessions[name].id)]
    (guest, other) = [name for name in names if name not in hosts]
    work(1, names)
    (child,) = children(service, sessions[hosts[0]].id)
    os.kill(child, signal.SIGKILL)
    work(2, names)
    os.kill(service.pid("worker"), signal.SIGKILL)
    work(3, names)
    client.sessions.park(sessions[guest].id)
    wait_for(lambda: sessions[guest].status()["status"] == "parked", 60, "one to be parked")
    work(4, [other])
    work(4, [*hosts, guest])
    shared(*sessions.values())
    (host,) = [name for name in names if children(service, sessions[name].id)]
    rest = [name for name in names if name != host]
    work(5, [host])
    sessions[host].close()
    work(5, rest)
    for name in names:
        assert all(np.array_equal(one, two) for one, two in zip(found[name], expected[name], strict=True)), name
    stack.close()
    client.close()


def test_a_client_that_vanishes_leaves_what_others_can_use(service: Service, models: Path) -> None:
    """It goes in the middle of an operation, whose number others do not know: the operation is computed once, a second
    client goes on with numbers far beyond, and the session is parked."""
    client = Client(service.note()["url"], service.key, patience=120)
    spec = {"precision": "fp32", "resources": {"accelerator": "cpu"}, "idle_seconds": 2.0}
    with client.session(model=str(models / "tiny"), method=METHOD, **spec) as session:
        path = f"/sessions/{session.id}/operations"
        body = {"op": "forward_backward", "model": "default"}
        sent = json.dumps(operation(7, operation=body)).encode()
        url, position = httpx.URL(service.note()["url"]), int(session.status()["operations"]) + 1
        with socket.create_connection((url.host, url.port)) as gone:
            head = f"POST {path}?wait=30 HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
            head += f"Authorization: Bearer {service.key}\r\nContent-Length: {len(sent)}\r\n\r\n"
            gone.sendall(head.encode() + sent)
            wait_for(lambda: service.client.get(f"{path}/{position}").status_code == 200, 60, "it to be accepted")
        asked = operation(900, operation=body | {"op": "forward"})
        other = service.client.post(path, params={"wait": 30}, json=asked).json()
        assert other["status"] == "done" and other["position"] == position + 1
        first = service.client.get(f"{path}/{position}").json()
        assert first["status"] == "done" and first["result"]["micro_steps"] == 1
        assert service.client.post(path, json=operation(7, operation=body)).json()["position"] == position
        wait_for(lambda: session.status()["status"] == "parked", 60, "the session to be parked")
        assert session.step(0.01).values["steps"] == 1, "the window was kept"
    client.close()


def operation(seq: int, **fields: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "operation": {"op": "forward", "model": "a"},
        "arrays": {"tokens": [1, 2], "lengths": [2]},
    } | fields


@pytest.mark.both_databases
def test_a_number_stands_for_one_operation(here: World, boss: Caller) -> None:
    session = here.session(here.lab, fresh=True)
    path = f"/sessions/{session}/operations"
    first = here.ask("POST", path, boss.key, json=operation(5))
    assert first.status_code == 202, first.text
    assert here.ask("POST", path, boss.key, json=operation(5)).json() == first.json()
    packed = tensors.pack(
        {"tokens": [1, 2], "lengths": [2]},
        {"seq": "5", "operation": json.dumps({"op": "forward", "model": "a"})},
    )
    headers = {"content-type": tensors.MEDIA_TYPE}
    same = here.ask("POST", path, boss.key, content=packed, headers=headers)
    assert same.json()["position"] == first.json()["position"], "in another form it is the same"
    other = here.ask("POST", path, boss.key, json=operation(5, arrays={"tokens": [1, 3], "lengths": [2]}))
    assert other.status_code == 409 and other.json()["error"]["code"] == "session_seq_reused"
    large = operation(6, arrays={"tokens": [1] * log.IN_ROWS, "lengths": [log.IN_ROWS]})
    for _ in range(2):
        assert here.ask("POST", path, boss.key, json=large).json()["position"] == first.json()["position"] + 1
    folder = here.layout.session(session) / "log"
    assert len([*folder.iterdir()]) == 1, "nothing is left of what was sent twice; little needs no file"
    with here.database.write() as writing:
        writing.execute(update(Job).where(Job.id == session).values(status="paused"))
    back = here.ask("POST", path, boss.key, json=operation(8)).json()
    assert back["session_status"] == "queued" and "waits for a slot" in back["reason"], "it is told as it is now"
    assert here.ask("POST", f"/sessions/{session}/close", boss.key).json()["status"] == "closed"
    late = here.ask("POST", path, boss.key, json=operation(7))
    assert late.status_code == 409 and late.json()["error"]["code"] == "session_ended"
    over = here.ask("GET", f"{path}/1?wait=30", boss.key)
    assert over.json()["status"] == "waiting" and over.json()["session_status"] == "closed"


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"json": operation(-1)}, "seq"),
        ({"json": operation(1, operation={"op": "sing"})}, "operation"),
        ({"json": operation(1, operation={"op": "step", "model": "a"})}, "operation.learning_rate"),
        ({"json": operation(1, arrays={"tokens": ["x"], "lengths": [1]})}, "arrays.tokens"),
        ({"json": operation(1, arrays=[1])}, "arrays"),
        (
            {"json": operation(1, arrays={"tokens": [1], "lengths": [1] * (tensors.MOST_EXAMPLES + 1)})},
            "arrays.lengths",
        ),
        ({"content": b"", "headers": {"content-type": tensors.MEDIA_TYPE}}, "body"),
        ({"content": b"\xff" * 64, "headers": {"content-type": tensors.MEDIA_TYPE}}, "body"),
        ({"content": tensors.pack({"tokens": [1]}), "headers": {"content-type": tensors.MEDIA_TYPE}}, "body"),
    ],
)
def test_what_is_no_operation_is_refused_with_its_field(
    here: World, boss: Caller, sent: dict[str, Any], field: str
) -> None:
    session = here.session(here.lab, fresh=False)
    reply = here.ask("POST", f"/sessions/{session}/operations", boss.key, **sent)
    assert reply.status_code == 422 and reply.json()["error"]["field"] == field, reply.text


def test_a_compressed_body_is_refused_before_it_is_read(here: World, boss: Caller) -> None:
    """Its size would be that of what comes out: ten bytes of zstd may stand for gigabytes."""
    session = here.session(here.lab, fresh=False)
    doors = {
        f"/sessions/{session}/operations": {"content-type": tensors.MEDIA_TYPE},
        "/api/v1/forward_backward": {"content-type": "application/x-protobuf"},
        "/sessions": {"content-type": "application/json"},
    }
    for path, headers in doors.items():
        for coding in ("zstd", "gzip", "br", "gzip, zstd"):
            sent = {"content": b"\x28\xb5\x2f\xfd", "headers": headers | {"content-encoding": coding}}
            reply = here.ask("POST", path, boss.key, **sent)
            assert reply.status_code == 415 and "Content-Encoding" in reply.text, reply.text
    plain = here.ask("POST", "/sessions", boss.key, json={}, headers={"content-encoding": "identity"})
    assert plain.status_code == 422 and plain.json()["error"]["field"] == "model"


def test_sessions_of_another_project_are_not_there(here: World, boss: Caller) -> None:
    theirs = here.session(here.rivals, fresh=False)
    for method, path in (("GET", ""), ("POST", "/close"), ("POST", "/operations"), ("GET", "/operations/1")):
        sent = {"json": operation(1)} if path == "/operations" else {}
        assert here.ask(method, f"/sessions/{theirs}{path}", boss.key, **sent).status_code == 404
    mine = here.session(here.lab, fresh=False)
    assert mine in [one["id"] for one in here.ask("GET", "/sessions?limit=200", boss.key).json()["data"]]


@pytest.mark.both_databases
def test_who_parks_and_lists_sessions(here: World, boss: Caller) -> None:
    """A session is parked at once unless an operation waits; a parked one that nobody uses is closed in the end."""
    session = here.session(here.lab, fresh=True)
    refused = here.ask("POST", f"/sessions/{session}/park", boss.key)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "session_in_use", refused.text
    with here.database.write() as written:
        written.execute(update(SessionOperation).where(SessionOperation.session_id == session).values(done_at=db_now()))
    for _ in range(2):
        assert here.ask("POST", f"/sessions/{session}/park", boss.key).json()["status"] == "parked"
    parked = here.ask("GET", "/sessions?status=parked&limit=200", boss.key).json()["data"]
    assert session in [one["id"] for one in parked] and {one["status"] for one in parked} == {"parked"}
    mine = here.ask("GET", "/sessions?mine=true&limit=200", boss.key).json()["data"]
    assert session not in [one["id"] for one in mine], "another member has opened it"
    odd = here.ask("GET", "/sessions?status=paused", boss.key)
    assert odd.status_code == 422 and odd.json()["error"]["field"] == "status", odd.text
    with here.database.write() as written:
        assert session not in idle.close_unused(written, 1.0), "it was used just now"
        written.execute(update(SessionRow).where(SessionRow.id == session).values(used_at=db_now() - 3601.0))
        assert session in idle.close_unused(written, 1.0)
    closed = here.ask("GET", f"/sessions/{session}", boss.key).json()
    assert closed["status"] == "closed" and "EFT_UNUSED_SESSION_HOURS" in closed["reason"]
    late = here.ask("POST", f"/sessions/{session}/park", boss.key)
    assert late.status_code == 409 and late.json()["error"]["code"] == "session_ended"


@pytest.mark.both_databases
def test_results_go_when_they_are_old(here: World, boss: Caller) -> None:
    """Their files, once, whoever has not fetched them; what was computed stays known."""
    session = here.session(here.lab, fresh=True)
    path = f"/sessions/{session}/operations"
    arrays = tensors.pack({"logprobs": [-0.5, -0.25]})
    placed: dict[int, Path] = {}
    for seq, hours in ((11, 25.0), (12, 23.0)):
        position = here.ask("POST", path, boss.key, json=operation(seq)).json()["position"]
        placed[seq] = log.result_path(here.layout.session(session), position)
        placed[seq].parent.mkdir(parents=True, exist_ok=True)
        placed[seq].write_bytes(arrays)
        ended = {"done_at": db_now() - hours * 3600, "result": {"loss": 1.0}, "result_sha256": "0" * 64}
        with here.database.write() as written:
            mine = (SessionOperation.session_id == session) & (SessionOperation.position == position)
            written.execute(update(SessionOperation).where(mine).values(result_bytes=len(arrays), **ended))
            counted = SessionRow.log_bytes + len(arrays)
            written.execute(update(SessionRow).where(SessionRow.id == session).values(log_bytes=counted))
    before = here.ask("GET", f"/sessions/{session}", boss.key).json()["log_bytes"]
    assert log.forget_results(here.database, here.layout, 24.0) == 1
    assert log.forget_results(here.database, here.layout, 24.0) == 0
    assert not placed[11].exists() and placed[12].exists()
    assert here.ask("GET", f"/sessions/{session}", boss.key).json()["log_bytes"] == before - len(arrays)
    gone = here.ask("POST", path, boss.key, json=operation(11))
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "session_result_expired", gone.text
    there = here.ask("GET", f"{path}/{int(placed[12].stem)}", boss.key).json()
    assert there["result"] == {"loss": 1.0} and there["arrays"]["logprobs"] == [-0.5, -0.25]


@pytest.mark.parametrize("op", ["load", "logprobs"])
def test_an_operation_reads_no_folder_of_others(here: World, boss: Caller, tmp_path: Path, op: str) -> None:
    """Neither another project's saved adapter, nor anything that is outside of EFT_MODEL_ROOTS."""
    mine, theirs = here.session(here.lab, fresh=True), here.session(here.rivals, fresh=False)
    link = tmp_path / "link"
    link.symlink_to(here.layout.session(theirs) / "saved" / "x")
    own = here.layout.session(mine)

    def send(seq: int, folder: Path | str) -> Any:
        asked = {"op": op, "folder": str(folder)} | ({"model": "a"} if op == "load" else {})
        return here.ask("POST", f"/sessions/{mine}/operations", boss.key, json=operation(seq, operation=asked))

    assert send(11, own / "saved" / "x").status_code == 202
    rival = here.layout.session(theirs)
    for folder in (
        link,
        rival / "saved" / "x",
        own / "saved" / ".." / ".." / ".." / theirs / "session" / "saved" / "x",
    ):
        reply = send(12, folder)
        assert reply.status_code == 404 and reply.json()["error"]["field"] == "operation.folder", reply.text
    for outside in ("/etc", "relative", own / "snapshots" / "x", rival / "saved" / "x" / "y", rival, tmp_path):
        reply = send(12, outside)
        assert reply.status_code == 422 and reply.json()["error"]["field"] == "operation.folder", reply.text
        assert reply.json()["error"]["code"] == "path_not_allowed"


def test_a_wish_names_what_is_wrong(here: World, boss: Caller) -> None:
    for wish, field in (({"model": "a/b", "quantization": {"type": "int2"}}, "quantization"), ({}, "model")):
        reply = here.ask("POST", "/sessions", boss.key, json=wish)
        assert reply.status_code == 422 and reply.json()["error"]["field"].startswith(field), reply.text


def test_ranks_for_which_no_node_has_slots_are_refused(here: World, boss: Caller) -> None:
    def refused(reply: Any, *words: str) -> None:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["field"]) == (422, "fits_nowhere", "resources.gpus"), reply.text
        assert all(word in error["message"] for word in words), error

    wish = {"model": "a/b", "method": "full", "resources": {"gpus": 2}}
    refused(here.ask("POST", "/sessions", boss.key, json=wish), "2 slots of one node", "set `resources.gpus` to 1")
    wish["resources"] = {"gpus": 2, "requirements": {"arch": ["gfx90a"]}}
    refused(here.ask("POST", "/sessions", boss.key, json=wish), "no slot here has gfx90a")


def test_errors_of_the_client_are_its_own(here: World) -> None:
    assert issubclass(ApiError, Exception) and OperationFailed("m", "c", "f").field == "f"
