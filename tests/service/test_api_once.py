"""Every POST of the document takes an Idempotency-Key: the same request again has the same answer and does nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from api.auth.policy import Role, Scope
from api.http.idempotency import IdempotencyKeyReused
from api.jobs.service import Jobs, OnlyOnce
from core.db.tables import ApiKey, Audit, Delivery, Hold, IdempotencyKey, Job, SessionOperation, Webhook
from core.jobs.base.transitions import Actor
from tests.support.requests import OF_ANOTHER_PROTOCOL, filled, objects, request_of
from tests.support.world import MODEL, Caller, World


def posts(here: World) -> list[str]:
    found = {path for path, methods in here.app.openapi()["paths"].items() if "post" in methods}
    return sorted(found - OF_ANOTHER_PROTOCOL)


def prepared(here: World, path: str, boss: Caller) -> dict[str, str]:
    """Things that the route can be asked of with success."""
    things = objects(here, here.lab, fresh=True)
    verb = path.rpartition("/")[2]
    if path.startswith("/jobs/"):
        job = here.ask("POST", "/jobs", boss.key, json={"model": MODEL, "data": here.lab.file}).json()["id"]
        for earlier in {"resume": ["pause"], "retry": ["cancel"]}.get(verb, []):
            assert here.ask("POST", f"/jobs/{job}/{earlier}", boss.key).status_code == 200
        things["job_id"] = job
    if path == "/webhooks":  # a project has at most twenty
        with here.database.write() as session:
            session.execute(delete(Delivery))
            session.execute(delete(Webhook))
    if path == "/holds/release":
        here.ask("POST", "/holds", boss.key, json={"gpus": ["box/cpu"]})
    if verb == "park":  # its operation has been computed
        with here.database.write() as session:
            one = SessionOperation.session_id == things["session_id"]
            session.execute(update(SessionOperation).where(one).values(done_at=1.0))
    if path in ("/holds", "/gpus/drain"):
        with here.database.write() as session:
            session.execute(update(Hold).values(released_at=1.0))
    return things


def changes(here: World) -> int:
    with here.database.read() as session:
        return int(session.execute(select(func.count()).select_from(Audit)).scalar_one())


def test_every_post_states_it(here: World) -> None:
    assert len(posts(here)) >= 26
    for path in posts(here):
        operation = here.app.openapi()["paths"][path]["post"]
        headers = {one["name"].lower() for one in operation["parameters"] if one["in"] == "header"}
        assert "idempotency-key" in headers, f"{path}: give it `once: Asked` and answer by `answer` (api/http/once.py)"


@pytest.mark.both_databases
def test_every_post_is_done_once(here: World, boss: Caller) -> None:
    used: list[str] = []
    for number, path in enumerate(posts(here)):
        things = prepared(here, path, boss)
        request = request_of(here, ("POST", path), here.lab)
        headers = {"idempotency-key": f"once-{number}"}

        def send(request: dict[str, Any] = request, path: str = filled(path, things), headers: Any = headers) -> Any:
            return here.ask("POST", path, boss.key, headers=headers, **request)

        first = send()
        assert first.status_code < 300, (path, first.text)
        assert "idempotency-replayed" not in first.headers, path
        done = changes(here)
        again = send()
        assert (again.status_code, again.json()) == (first.status_code, first.json()), path
        assert again.headers["idempotency-replayed"] == "true", path
        assert again.headers.get("location") == first.headers.get("location"), path
        assert again.headers.get("cache-control") == first.headers.get("cache-control"), path
        assert changes(here) == done, f"{path} was done twice"
        # The same key with another request.
        for other in used[:1]:
            reply = here.ask("POST", filled(path, things), boss.key, headers={"idempotency-key": other}, **request)
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "idempotency_key_reused"), path
        used.insert(0, headers["idempotency-key"])


def test_a_refusal_does_not_use_the_key_up(here: World, boss: Caller) -> None:
    headers = {"idempotency-key": "refused"}
    name = here.fresh("name")
    assert here.ask("POST", "/users", boss.key, headers=headers, json={"name": ""}).status_code == 422
    missing = here.ask("POST", "/projects", boss.key, headers=headers, json={"name": name, "admin": "nobody"})
    assert missing.status_code == 404
    assert here.ask("POST", "/users", boss.key, headers=headers, json={"name": name}).status_code == 201
    for key in ("", "x" * 256):
        reply = here.ask("POST", "/users", boss.key, headers={"idempotency-key": key}, json={"name": name})
        assert (reply.status_code, reply.json()["error"]["field"]) == (422, "idempotency-key")


def test_a_file_is_compared_by_its_bytes(here: World, boss: Caller) -> None:
    def send(data: bytes, boundary: str) -> Any:
        body = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="r.jsonl"\r\n\r\n'.encode()
            + data
            + f"\r\n--{boundary}--\r\n".encode()
        )
        kind = f"multipart/form-data; boundary={boundary}"
        return here.ask(
            "POST", "/files", boss.key, content=body, headers={"content-type": kind, "idempotency-key": "file"}
        )

    first, again = send(b'{"text": "a"}\n', "one"), send(b'{"text": "a"}\n', "another")
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    assert send(b'{"text": "b"}\n', "one").json()["error"]["code"] == "idempotency_key_reused"
    kept = {path.name for path in here.layout.files.iterdir()}
    assert first.json()["id"] in kept
    assert not list(here.layout.uploads.iterdir()), "what was sent again is not kept"


def test_a_secret_is_not_kept_and_comes_again_to_its_own_key_alone(here: World, boss: Caller) -> None:
    other = here.caller("other boss", Role.ADMIN, Scope.BOX, box_admin=True)
    headers = {"idempotency-key": "secret"}
    first = here.ask("POST", "/keys", boss.key, headers=headers, json={"name": "once"})
    with here.database.read() as session:
        row = session.execute(select(IdempotencyKey).where(IdempotencyKey.key == "secret")).scalar_one()
        assert session.execute(select(func.count()).where(ApiKey.name == "once")).scalar_one() == 1
    key = first.json()["key"]
    assert key not in str(row.body) and row.body["key"].startswith("sealed:")
    assert key.encode().hex() not in row.body["key"] and boss.key not in str(row.body)
    again = here.ask("POST", "/keys", boss.key, headers=headers, json={"name": "once"})
    assert again.json() == first.json() and here.ask("GET", "/me", again.json()["key"]).status_code == 200
    theirs = here.ask("POST", "/keys", other.key, headers=headers, json={"name": "once"})
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (409, "shown_to_another_key")
    with here.database.write() as session:
        forged = row.body | {"key": row.body["key"][:-2] + ("00" if row.body["key"][-2:] != "00" else "01")}
        session.execute(update(IdempotencyKey).where(IdempotencyKey.key == "secret").values(body=forged))
    assert here.ask("POST", "/keys", boss.key, headers=headers, json={"name": "once"}).status_code == 409


def test_many_at_once_are_done_once(here: World, boss: Caller) -> None:
    from api.auth import service
    from api.http.once import Once, answer
    from core.jobs.lifecycle.submit import submit

    installation = here.app.state.eft
    with here.database.read() as session:
        principal = service.authenticate(session, boss.key)
        before = session.execute(select(func.count()).select_from(Job)).scalar_one()
    assert principal is not None
    once = Once("race", "/race?", boss.key.encode())

    def send(_: int) -> str:
        spec = here.spec(here.lab.file)
        reply = answer(
            installation, principal, once, None, lambda session: {"id": submit(session, principal, spec).id[4:]}
        )
        return bytes(reply.body).decode()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(send, range(8)))) == 1
    with here.database.read() as session:
        assert session.execute(select(func.count()).select_from(Job)).scalar_one() == before + 1


def test_a_job_is_made_from_a_document_of_whatever_contract(here: World) -> None:
    """Another router translates its own contract and has its own idempotency; no bytes of ours are made up for it."""
    state = here.app.state.eft
    jobs = Jobs(state.database, state.settings, state.layout)
    document = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": here.lab.file}
    actor = Actor(here.lab.owner.user_id, here.lab.id)
    once = OnlyOnce(here.fresh("batch"), ("of another contract",))
    made = [jobs.create_from_document(actor, document, once=mark) for mark in (once, once, None, None)]
    assert [(reply.status, reply.replayed) for reply in made] == [(201, False), (201, True), (201, False), (201, False)]
    assert len({reply.body["id"] for reply in made}) == 3
    with pytest.raises(IdempotencyKeyReused):
        jobs.create_from_document(actor, document, once=OnlyOnce(once.key, ("another request",)))
