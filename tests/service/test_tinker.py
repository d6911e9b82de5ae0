"""Tinker's door without a trainer: what belongs to whom, what is refused, and what saved weights become."""

from __future__ import annotations

import json
import random
import secrets
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from api.auth.policy import Role, Scope
from api.tinker import bases, door, downloads
from api.tinker.forms import bodies, messages, wire
from core.db.engine import db_now
from core.db.tables import Job, SessionOperation, SessionRow
from core.errors import SpecError
from core.jobs.lifecycle.sessions import idle, saves
from tests.support.world import MODEL, Caller, World

PROTOBUF = {"content-type": "application/x-protobuf"}
WEIGHTS = random.Random(1).randbytes(100_000)


@pytest.fixture(scope="module")
def run(here: World, boss: Caller) -> str:
    """A model of `lab`, parked."""
    return model(here, boss)


@pytest.fixture(scope="module")
def rival(here: World) -> Caller:
    return here.caller("rival", Role.ADMIN, Scope.WRITE, project=here.rivals.id)


def model(here: World, caller: Caller) -> str:
    session = send(here, caller, "create_session", {}).json()["session_id"]
    wish = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "user_metadata": {"renderer": "plain"}}
    made = send(here, caller, "create_model", wish)
    assert made.status_code == 200, made.text
    assert send(here, caller, "create_model", wish).json() == made.json(), "asked again it is the same"
    host = made.json()["request_id"].partition(".")[0]
    with here.database.write() as open_session:  # it takes no slot from others here
        open_session.execute(update(Job).where(Job.id == host).values(status="paused"))
    return f"{session}:train:0"


def test_a_model_names_the_number_of_its_gpus(here: World, boss: Caller) -> None:
    """The box has one slot."""
    session = send(here, boss, "create_session", {}).json()["session_id"]
    for gpus, words in (("2", "resources.gpus"), ("many", "eft:gpus")):
        wish = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "user_metadata": {"eft:gpus": gpus}}
        refused = send(here, boss, "create_model", wish)
        assert 400 <= refused.status_code < 500 and words in refused.text, refused.text


def send(here: World, caller: Caller, path: str, body: Any) -> Any:
    return here.ask("POST", f"/api/v1/{path}", caller.key, json=body)


def forward_backward(run: str, seq: int) -> bytes:
    tokens = wire.message((1, wire.message((1, (5).to_bytes(4, "little")))))
    targets = wire.message((1, "target_tokens"), (2, wire.message((1, (6).to_bytes(8, "little")), (3, 2), (4, 1))))
    datum = wire.message((1, tokens), (2, targets))
    return wire.message((1, run), (2, seq), (3, datum), (4, "cross_entropy"))


def save(here: World, caller: Caller, run: str, seq: int, name: str, kind: str = "weights", **more: Any) -> str:
    """The ticket of a save, whose folder is there."""
    route = "save_weights_external" if kind == "external_weights" else "save_weights"
    reply = send(here, caller, route, {"model_id": run, "seq_id": seq, "path": name} | more)
    assert reply.status_code == 200, reply.text
    host, _, position = reply.json()["request_id"].partition(".")
    folder = here.layout.session(host) / "saved" / f"{door.KINDS[kind]}-{seq}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "/a/folder/of/the/box"}')
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    done(here, host, int(position))
    return str(reply.json()["request_id"])


def done(here: World, host: str, position: int) -> None:
    with here.database.write() as session:
        session.execute(
            update(SessionOperation)
            .where(SessionOperation.session_id == host, SessionOperation.position == position)
            .values(done_at=db_now(), result={})
        )


def names(here: World, caller: Caller, run: str) -> list[str]:
    found = here.ask("GET", f"/api/v1/training_runs/{run}/checkpoints", caller.key)
    assert found.status_code == 200, found.text
    return [one["checkpoint_id"] for one in found.json()["checkpoints"]]


@pytest.mark.both_databases
def test_saved_weights_are_listed_replaced_and_removed(here: World, boss: Caller) -> None:
    run = model(here, boss)
    path = f"/api/v1/training_runs/{run}"
    ticket = save(here, boss, run, 1, "first", user_metadata={"batch": 7})
    assert save(here, boss, run, 1, "first", user_metadata={"batch": 7}) == ticket
    taken = send(here, boss, "save_weights", {"model_id": run, "seq_id": 2, "path": "first"})
    assert taken.status_code == 400 and taken.json()["code"] == "session_name_taken"
    save(here, boss, run, 3, "first", overwrite=True)
    save(here, boss, run, 4, "second", ttl_seconds=3600)
    assert sorted(names(here, boss, run)) == ["weights/first", "weights/second"]
    about = here.ask("GET", path, boss.key).json()
    assert about["user_metadata"] == {"renderer": "plain"} and about["last_checkpoint"]["expires_at"]
    info = send(here, boss, "weights_info", {"tinker_path": f"tinker://{run}/weights/first"}).json()
    assert info["lora_rank"] == 8 and info["base_model"]
    forever = here.ask("PUT", f"{path}/checkpoints/weights/second/ttl", boss.key, json={"ttl_seconds": None})
    assert forever.status_code == 204
    assert here.ask("DELETE", f"{path}/checkpoints/weights/second", boss.key).status_code == 204
    assert here.ask("DELETE", f"{path}/checkpoints/weights/second", boss.key).status_code == 404
    assert names(here, boss, run) == ["weights/first"]
    host = ticket.partition(".")[0]
    folder = here.layout.session(host) / "saved"
    saves.sweep(here.database, here.layout)
    assert len([*folder.iterdir()]) == 3, "after a crash the log since the snapshot is computed again"
    with here.database.write() as session:
        session.execute(update(SessionRow).where(SessionRow.id == host).values(snapshot=100))
    assert saves.sweep(here.database, here.layout) == 2
    assert [path.name for path in folder.iterdir()] == ["w-3"]
    assert names(here, boss, run) == ["weights/first"]


def test_the_runs_of_another_project_are_not_there(here: World, boss: Caller, rival: Caller, run: str) -> None:
    ticket = save(here, boss, run, 900, "mine")
    host = ticket.partition(".")[0]
    path = f"tinker://{run}/weights/mine"
    session = run.partition(":")[0]
    sent = {
        "get_info": {"model_id": run},
        "optim_step": {"model_id": run, "seq_id": 5, "adam_params": {}},
        "save_weights": {"model_id": run, "seq_id": 5, "path": "x"},
        "save_weights_for_sampler": {"model_id": run, "seq_id": 7, "path": "x"},
        "load_weights": {"session_id": secrets.token_hex(16), "model_seq_id": 0, "path": path},
        "create_sampling_session": {"session_id": secrets.token_hex(16), "model_path": path},
        "asample": {"sampling_session_id": f"{host}:{host}:w-900", "prompt": {"chunks": [{"tokens": [1]}]}}
        | {"sampling_params": {"max_tokens": 1}},
        "weights_info": {"tinker_path": path},
        "retrieve_future": {"request_id": ticket},
    }
    for route, body in sent.items():
        assert send(here, rival, route, body).status_code == 404, route
        if route not in ("optim_step", "asample"):
            assert send(here, boss, route, body).status_code in (200, 408), route
    body = forward_backward(run, 6)
    assert here.ask("POST", "/api/v1/forward_backward", rival.key, content=body, headers=PROTOBUF).status_code == 404
    for method, url in (
        ("GET", f"training_runs/{run}"),
        ("GET", f"training_runs/{run}/checkpoints"),
        ("DELETE", f"training_runs/{run}/checkpoints/weights/mine"),
        ("GET", f"samplers/{host}:{host}:w-900"),
        ("GET", f"sessions/{session}"),
    ):
        assert here.ask(method, f"/api/v1/{url}", rival.key).status_code == 404, url
    for url in ("training_runs", "checkpoints", "sessions"):
        told = here.ask("GET", f"/api/v1/{url}?limit=1000", rival.key)
        assert told.status_code == 200 and session not in told.text
        assert session in here.ask("GET", f"/api/v1/{url}?limit=1000", boss.key).text
    assert "weights/mine" in names(here, boss, run)


def test_a_number_stands_for_one_request(here: World, boss: Caller, run: str) -> None:
    """Sent again it is the same; another one under its number is a 400, since the SDK sends a 409 again for minutes."""
    body = forward_backward(run, 40)
    first = here.ask("POST", "/api/v1/forward_backward", boss.key, content=body, headers=PROTOBUF)
    assert first.status_code == 200, first.text
    again = here.ask("POST", "/api/v1/forward_backward", boss.key, content=body, headers=PROTOBUF)
    assert again.json() == first.json()
    other = send(here, boss, "optim_step", {"model_id": run, "seq_id": 40, "adam_params": {}})
    assert other.status_code == 400 and other.json()["code"] == "session_seq_reused"
    assert here.ask("GET", f"/api/v1/sessions/{'0' * 32}", boss.key).status_code == 404


def broken(chance: random.Random, run: str) -> bytes:
    """A request that is cut, has bytes of others, or is noise."""
    whole = bytearray(forward_backward(run, chance.randrange(1000, 2**31)))
    match chance.randrange(4):
        case 0:
            return bytes(whole[: chance.randrange(len(whole))])
        case 1:
            whole[chance.randrange(len(whole))] = chance.randrange(256)
            return bytes(whole)
        case 2:
            at = chance.randrange(len(whole))
            return bytes(whole[:at] + whole[chance.randrange(len(whole)) :])
    return chance.randbytes(chance.randrange(200))


def test_noise_is_refused_and_never_a_fault_of_ours(here: World, boss: Caller, run: str) -> None:
    chance = random.Random(5)
    for _ in range(150):
        body = broken(chance, run)
        reply = here.ask("POST", "/api/v1/forward_backward", boss.key, content=body, headers=PROTOBUF)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        assert reply.status_code == 200 or reply.json()["detail"]
    odd = [None, [], {}, "x", -1, 10**30, 1e400, {"a": []}, "\ud800", "x" * 5000, [[1]], {"chunks": [3]}, True]
    routes = {
        "create_model": {"session_id": "0" * 32, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}},
        "optim_step": {"model_id": run, "seq_id": 5, "adam_params": {"learning_rate": 0.1}},
        "save_weights": {"model_id": run, "seq_id": 5, "path": "x", "ttl_seconds": 5, "user_metadata": {}},
        "load_weights": {"session_id": "0" * 32, "model_seq_id": 0, "path": f"tinker://{run}/weights/x"},
        "asample": {"sampling_session_id": "session-x", "prompt": {"chunks": [{"tokens": [1]}]}, "num_samples": 1},
        "forward": {"model_id": run, "seq_id": 5, "forward_input": {"data": [], "loss_fn": "cross_entropy"}},
        "weights_info": {"tinker_path": f"tinker://{run}/weights/x"},
        "retrieve_future": {"request_id": f"{run}.1"},
        "retrieve_futures": {"target": {"sampling_session_id": "x:y"}, "prev_cursor": 0, "timeout": 0},
        "join_sampling_session": {"sampling_session_id": "x:y"},
        "cancel_future": {"request_id": f"{run}.1"},
        "save_weights_external": {"model_id": run, "seq_id": 8, "path": "y", "age_encryption_recipients": []},
        "copy_weights": {"source_path": f"tinker://{run}/weights/x", "destination_project_id": None, "ttl_seconds": 5},
    }
    for route, body in routes.items():
        for field in body:
            for value in odd:
                content = json.dumps(body | {field: value}).encode()
                reply = here.ask("POST", f"/api/v1/{route}", boss.key, content=content)
                assert reply.status_code in (200, 400, 404, 408), (route, field, value, reply.text)
                assert reply.status_code in (200, 408) or reply.json()["detail"]


def test_a_million_data_are_refused_as_soon_as_there_are_too_many() -> None:
    one = forward_backward("x", 1)
    datum = wire.message(*[(number, wire.sub(value)) for number, value in wire.fields(one) if number == 3])
    with pytest.raises(SpecError, match="65,536 examples at most") as told:
        messages.read_pass(datum * 70_000 + b"\xff")  # what is behind them is not read
    assert (told.value.code, told.value.field) == ("too_many_examples", "data")


def test_a_sampler_of_the_same_base_needs_no_session_of_its_own(here: World, boss: Caller, run: str) -> None:
    session = run.partition(":")[0]
    wish = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    made = send(here, boss, "create_sampling_session", wish).json()["sampling_session_id"]
    about = here.ask("GET", f"/api/v1/sessions/{session}", boss.key).json()
    assert about == {"training_run_ids": [run], "sampler_ids": []}
    shown = here.ask("GET", f"/api/v1/samplers/{made}", boss.key).json()
    assert shown == {"sampler_id": made, "base_model": MODEL}


def test_a_folder_below_the_roots_has_a_name(tmp_path: Path) -> None:
    for folder in ("Qwen/Qwen3-4B", "tiny", "not one", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    assert bases.known([tmp_path, tmp_path / "none"]) == ["tiny", "Qwen/Qwen3-4B"]
    local = bases.named([tmp_path], "Qwen/Qwen3-4B:peft:262144")
    assert local.model == str(tmp_path / "Qwen/Qwen3-4B") and local.shown == "Qwen/Qwen3-4B:peft:262144"
    for name in ("other/model", "../tiny", ".hidden", "/etc", "tiny/..", "x" * 300):
        assert bases.named([tmp_path], name).model == name


def test_sparse_tensors_are_written_out_or_refused() -> None:
    found, wide = messages.numbers([5, 6, 7], [2, 4], ([0, 2, 3], [1, 3, 0]), "x")
    assert wide == 4 and found == [0, 5, 0, 6, 7, 0, 0, 0]
    wrong: list[tuple[list[int], tuple[list[int], list[int]]]] = [
        ([2, 4], ([0, 2, 3], [1, 3, 4])),
        ([2, 4], ([0, 2, 3], [1, -1, 0])),
        ([2, 4], ([0, 3, 2], [1, 3, 0])),
        ([2, 4], ([1, 2, 3], [1, 3, 0])),
        ([2, 4], ([0, 3], [1, 3, 0])),
        ([2, 4], ([], [])),
        ([6], ([0, 3], [1, 3, 0])),
        ([2, 0], ([0, 2, 3], [1, 3, 0])),
        ([2**40, 2**40], ([0, 2, 3], [1, 3, 0])),
        ([2, 2, 2], ([0, 2, 3], [1, 3, 0])),
    ]
    for shape, indices in wrong:
        with pytest.raises(SpecError):
            messages.numbers([5, 6, 7], shape, indices, "x")
    with pytest.raises(SpecError):
        messages.numbers([5, 6, 7], [2, 2], None, "x")


@pytest.mark.both_databases
def test_a_copy_of_saved_weights_is_of_the_project_that_asked(here: World, boss: Caller, rival: Caller) -> None:
    run = model(here, boss)
    ticket = save(here, boss, run, 1, "first", user_metadata={"batch": 7})
    path = f"tinker://{run}/weights/first"

    def copy(caller: Caller, once: str = "", token: str | None = None, **more: Any) -> Any:
        given = {"x-idempotency-key": once, "x-tinker-weights-access-token": token}
        headers = {name: value for name, value in given.items() if value}
        body = {"source_path": path} | more
        return here.ask("POST", "/api/v1/copy_weights", caller.key, json=body, headers=headers)

    mine = copy(boss, "one", ttl_seconds=3600)
    assert mine.status_code == 200 and copy(boss, "one", ttl_seconds=3600).json() == mine.json()
    assert copy(boss, "two").json() != mine.json()
    assert copy(rival).status_code == 404 and copy(rival, token="tml-eft_wrong").status_code == 401
    elsewhere = copy(boss, destination_project_id=here.rivals.id)
    assert elsewhere.status_code == 400 and "weights_access_token" in elsewhere.json()["detail"]
    theirs = copy(rival, token=f"tml-{boss.key}", destination_project_id=here.rivals.id).json()["tinker_path"]
    copied = theirs.split("/")[2]
    assert names(here, rival, copied) == ["weights/first"] and copied != run
    about = here.ask("GET", f"/api/v1/training_runs/{copied}", rival.key).json()
    assert about["lora_rank"] == 8 and about["last_checkpoint"]["user_metadata"] == {"batch": "7"}
    assert send(here, boss, "weights_info", {"tinker_path": theirs}).status_code == 404
    assert here.ask("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/first", boss.key).status_code == 204
    with here.database.write() as session:
        host = ticket.partition(".")[0]
        session.execute(update(SessionRow).where(SessionRow.id == host).values(snapshot=100))
    assert saves.sweep(here.database, here.layout) == 1, "the files of a copy are its own"
    assert send(here, rival, "weights_info", {"tinker_path": theirs}).json()["lora_rank"] == 8
    step = send(here, rival, "optim_step", {"model_id": copied, "seq_id": 1, "adam_params": {}})
    assert step.status_code == 400 and "ended" in step.json()["detail"], "there is nothing to train"
    again = {"session_id": "1" * 32, "model_seq_id": 0}
    assert copy(boss, **again).status_code == 404, "it has gone"
    assert copy(boss, session_id="x", model_seq_id=0).status_code in (400, 404)


@pytest.mark.both_databases
def test_a_session_is_not_unused_while_its_program_says_that_it_lives(here: World, boss: Caller, rival: Caller) -> None:
    run = model(here, boss)
    session = run.partition(":")[0]
    with here.database.read() as reading:
        host = reading.execute(select(Job.id).where(Job.name == f"tinker {session} m0")).scalar_one()

    def used(ago: float | None = None) -> float:
        with here.database.write() as open_session:
            if ago is not None:
                moved = update(SessionRow).where(SessionRow.id == host).values(used_at=db_now() - ago)
                open_session.execute(moved)
            return float(open_session.execute(select(SessionRow.used_at).where(SessionRow.id == host)).scalar_one())

    body, old = {"session_id": session, "type": "session_heartbeat"}, used(ago=7200)
    assert send(here, rival, "session_heartbeat", body).status_code == 200 and used() == old
    assert send(here, boss, "session_heartbeat", body).json() == {"type": "session_heartbeat"}
    assert used() > old + 7000
    with here.database.write() as open_session:
        assert host not in idle.close_unused(open_session, 1.0)
    lately = used(ago=30)
    send(here, boss, "session_heartbeat", body)
    assert used() == lately, "one write a minute is enough"
    used(ago=7200)
    with here.database.write() as open_session:
        assert host in idle.close_unused(open_session, 1.0)


def test_the_ends_of_samples_are_told_in_order_and_a_cancelled_one_is_not_computed(
    here: World, boss: Caller, rival: Caller, run: str
) -> None:
    session = run.partition(":")[0]
    wish = {"session_id": session, "sampling_session_seq_id": 7, "base_model": MODEL}
    sampler = send(here, boss, "create_sampling_session", wish).json()["sampling_session_id"]
    joined = send(here, boss, "join_sampling_session", {"sampling_session_id": sampler}).json()["client_counter"]
    assert 1 <= joined <= 10**9
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}}
    body |= {"sampling_params": {"max_tokens": 1}}
    tickets = [
        send(here, boss, "asample", body | {"seq_id": clone * 10**9 + at}).json()["request_id"]
        for clone in (0, joined)
        for at in range(3)
    ]
    mine = tickets[:3]

    def polled(cursor: int = 0, clone: int = 0) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
        return send(here, boss, "retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0}).json()

    assert polled() == {"completions": [], "cursor": 0}
    for caller, status in ((rival, 404), (boss, 204), (boss, 204)):
        assert send(here, caller, "cancel_future", {"request_id": mine[1]}).status_code == status
    assert polled()["completions"] == [], "it is told behind those before it"
    assert send(here, boss, "retrieve_future", {"request_id": mine[1]}).json()["category"] == "user"
    host, _, position = mine[0].partition(".")
    done(here, host, int(position))
    ends = polled()
    assert ends["completions"] == [
        {"state": "finished", "request_id": mine[0]},
        {"state": "failed", "request_id": mine[1]},
    ]
    assert polled(ends["cursor"]) == {"completions": [], "cursor": ends["cursor"]}
    assert polled(clone=joined)["completions"] == []
    step = send(here, boss, "optim_step", {"model_id": run, "seq_id": 4000, "adam_params": {}}).json()["request_id"]
    refused = send(here, boss, "cancel_future", {"request_id": step})
    assert refused.status_code == 400 and "accepted" in refused.json()["detail"]
    target = {"target": {"sampling_session_id": sampler}, "timeout": 0}
    assert send(here, rival, "retrieve_futures", target).status_code == 404
    assert send(here, rival, "join_sampling_session", {"sampling_session_id": sampler}).status_code == 404


def test_a_newer_sdk_is_told_of_one_request_for_all_samples(here: World, boss: Caller) -> None:
    for version, new in (("0.37.1", False), ("0.38.0", True), ("1.0", True), ("", False), ("x", False)):
        told = send(here, boss, "client/config", {"sdk_version": version}).json()
        assert told.get("sample_use_retrieve_futures", False) is new
        cancels = send(here, boss, "client/dynamic_config", {"sdk_version": version}).json()
        assert cancels.get("sample_cancel_enabled", False) is new


def test_published_weights_are_read_by_other_projects_and_changed_by_none(
    here: World, boss: Caller, rival: Caller
) -> None:
    run = model(here, boss)
    ticket = save(here, boss, run, 1, "first")
    host, path = ticket.partition(".")[0], f"tinker://{run}/weights/first"
    url = f"/api/v1/training_runs/{run}/checkpoints/weights/first"
    reads: dict[str, dict[str, Any]] = {
        "weights_info": {"tinker_path": path},
        "load_weights": {"session_id": secrets.token_hex(16), "model_seq_id": 0, "path": path},
        "create_sampling_session": {"session_id": secrets.token_hex(16), "model_path": path},
        "copy_weights": {"source_path": path},
    }

    def statuses() -> list[int]:
        found = [send(here, rival, route, body).status_code for route, body in reads.items()]
        return [*found, here.ask("GET", f"{url}/archive", rival.key).status_code]

    assert statuses() == [404] * 5
    assert here.ask("POST", f"{url}/publish", rival.key).status_code == 404
    for _ in range(2):
        assert here.ask("POST", f"{url}/publish", boss.key).status_code == 204
    listed = here.ask("GET", f"/api/v1/training_runs/{run}/checkpoints", boss.key).json()["checkpoints"]
    assert listed[0]["public"] is True
    assert statuses() == [200] * 4 + [302]
    sampler = send(here, rival, "create_sampling_session", reads["create_sampling_session"]).json()
    shown = here.ask("GET", f"/api/v1/samplers/{sampler['sampling_session_id']}", rival.key).json()
    assert shown["model_path"] == path and not shown["sampler_id"].startswith(host), "it computes in their own session"
    asked = {"sampling_session_id": sampler["sampling_session_id"], "prompt": {"chunks": [{"tokens": [1]}]}}
    asked |= {"sampling_params": {"max_tokens": 1}}
    assert send(here, rival, "asample", asked).status_code == 200
    for method, more in (("DELETE", ""), ("PUT", "/ttl"), ("DELETE", "/publish")):
        assert here.ask(method, f"{url}{more}", rival.key, json={"ttl_seconds": 60}).status_code == 404
    assert here.ask("GET", f"/api/v1/training_runs/{run}", rival.key).status_code == 404
    other = send(here, rival, "load_weights", reads["load_weights"]).json()["request_id"]
    done(here, other.partition(".")[0], 1)
    assert send(here, rival, "retrieve_future", {"request_id": other}).json()["path"] == path
    assert here.ask("DELETE", f"{url}/publish", boss.key).status_code == 204
    after = {route: send(here, rival, route, body).status_code for route, body in reads.items()}
    assert after["weights_info"] == after["copy_weights"] == after["create_sampling_session"] == 404
    assert send(here, rival, "asample", asked | {"seq_id": 1}).status_code == 404
    assert send(here, rival, "retrieve_future", {"request_id": other}).json()["path"] is None
    assert here.ask("DELETE", url, boss.key).status_code == 204
    with here.database.write() as session:
        session.execute(update(SessionRow).where(SessionRow.id == host).values(snapshot=100))
    saves.sweep(here.database, here.layout)
    folder = here.layout.saved(host, "w-1")
    assert folder.is_dir(), "their session may have to load it again"
    with here.database.write() as session:
        session.execute(update(SessionRow).values(snapshot=100))
    saves.sweep(here.database, here.layout)
    assert not folder.exists()


def test_weights_leave_by_links_that_end(here: World, boss: Caller, rival: Caller, monkeypatch: Any) -> None:
    run = model(here, boss)
    save(here, boss, run, 1, "plain", "external_weights")
    url = f"/api/v1/training_runs/{run}/checkpoints/external_weights/plain"
    given = here.ask("GET", f"{url}/external_weights_urls", boss.key).json()
    assert sorted(given["urls"]) == [downloads.CONFIG, downloads.WEIGHTS] and given["expires"]
    assert here.ask("GET", f"{url}/external_weights_urls", rival.key).status_code == 404
    fetched = {name: here.ask("GET", link).content for name, link in given["urls"].items()}
    assert fetched[downloads.WEIGHTS] == WEIGHTS
    assert json.loads(fetched[downloads.CONFIG]) == {"r": 8, "base_model_name_or_path": MODEL}
    redirected = here.ask("GET", f"{url}/archive", boss.key)
    assert redirected.status_code == 302 and redirected.headers["expires"].endswith("GMT")
    with tarfile.open(fileobj=BytesIO(here.ask("GET", redirected.headers["location"]).content)) as tar:
        assert tar.getnames() == [downloads.CONFIG, downloads.WEIGHTS]
        assert all(one.isreg() and not one.uname for one in tar.getmembers())
        found = tar.extractfile(downloads.WEIGHTS)
        assert found is not None and found.read() == WEIGHTS
    link = given["urls"][downloads.WEIGHTS]
    token = link.split("/")[-2]
    # Not its last character, which has bits that say nothing.
    altered = token[:-5] + ("A" if token[-5] != "A" else "B") + token[-4:]
    for wrong in (link.replace(token, altered), link.replace(token, "x")):
        assert here.ask("GET", wrong).status_code == 404
    assert here.ask("GET", link.replace(downloads.WEIGHTS, "state.safetensors")).status_code == 404
    monkeypatch.setattr(downloads, "LINK_SECONDS", -1)
    late = here.ask("GET", f"{url}/external_weights_urls", boss.key).json()["urls"][downloads.WEIGHTS]
    assert here.ask("GET", late).status_code == 404


def test_weights_leave_encrypted_for_those_who_are_named(here: World, boss: Caller) -> None:
    import pyrage

    run, reader = model(here, boss), pyrage.x25519.Identity.generate()
    save(here, boss, run, 1, "x", "external_weights", age_encryption_recipients=[str(reader.to_public())])
    url = f"/api/v1/training_runs/{run}/checkpoints/external_weights/x"
    urls = here.ask("GET", f"{url}/external_weights_urls", boss.key).json()["urls"]
    assert sorted(urls) == [f"{downloads.CONFIG}.age", f"{downloads.WEIGHTS}.age"]
    sent = here.ask("GET", urls[f"{downloads.WEIGHTS}.age"]).content
    assert sent != WEIGHTS and pyrage.decrypt(sent, [reader]) == WEIGHTS
    assert here.ask("GET", f"{url}/archive", boss.key).status_code == 400
    wish = {"model_id": run, "seq_id": 2, "path": "z", "age_encryption_recipients": ["age1nobody"]}
    refused = send(here, boss, "save_weights_external", wish)
    assert refused.status_code == 400 and refused.json()["field"] == "age_encryption_recipients.0"


def test_named_targets_come_back_in_their_form() -> None:
    dense = bodies.PlainTensor(data=[4, -1, 5, 6], dtype="int64", shape=[2, 2])
    named, wide = messages.read_targets(dense, 3)
    assert (named, wide) == ([4, -1, 5, 6, -2, -2], 2) and all(isinstance(one, int) for one in named)
    told = messages.Targets.of(named, [-0.5, 0, -1, -2, 0, 0], wide)
    assert told == messages.Targets(2, 2, [-0.5, 0, -1, -2], None)
    sparse = {"sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [3, 0, 2]}
    named, wide = messages.read_targets(bodies.PlainTensor(data=[7, 8, 9], dtype="int64", shape=[2, 4], **sparse), 3)
    assert named == [-2, -2, -2, 7, 8, -2, 9, -2, *[-2] * 4]
    told = messages.Targets.of(named, [0, 0, 0, -1, -2, 0, -3, 0, *[0] * 4], wide)
    assert told == messages.Targets(2, 4, [-1, -2, -3], [[3], [0, 2]])
    for shape in ([3, 4], [2], None):
        with pytest.raises(SpecError):
            messages.read_targets(bodies.PlainTensor(data=[7] * 8, dtype="int64", shape=shape), 3)
