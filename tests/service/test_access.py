"""Keys, users, projects, members and the audit: what they do, over HTTP against the application itself."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from eft.cli import app
from eft.config import write_config
from sqlalchemy import select, update
from typer.testing import CliRunner

from api.auth import keys, people
from api.auth.last_use import LastUse
from api.auth.policy import Role, Scope, widest
from api.auth.service import authenticate
from api.events.router import while_allowed
from core.db.engine import db_now
from core.db.tables import ApiKey, Audit, Job, Project, User
from core.errors import Conflict
from core.jobs.lifecycle.claims import Slot, claim
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, cancel, submit
from core.jobs.policies import nodes
from tests.support.client import eft
from tests.support.world import MODEL, Caller, World

KEY = re.compile(r"eft_[0-9a-z]{8}_[0-9A-Za-z]{46}")
DAY = 86400


@pytest.fixture
def boss(here: World) -> Caller:
    return here.caller(here.fresh("boss"), Role.MEMBER, Scope.BOX, box_admin=True)


@pytest.fixture
def admin(here: World) -> Caller:
    return here.caller(here.fresh("admin"), Role.ADMIN, Scope.ADMIN)


@pytest.fixture
def member(here: World) -> Caller:
    return here.caller(here.fresh("member"), Role.MEMBER, Scope.WRITE)


def ok(reply: httpx.Response, status: int = 200) -> Any:
    assert reply.status_code == status, reply.text
    return reply.json()


def code(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["code"])


def seconds(moment: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(moment).timestamp()


# -- GPUs


def test_who_may_hold_gpus_and_for_how_long(here: World, member: Caller, admin: Caller, boss: Caller) -> None:
    """A role in a project gives nobody the box's GPUs for good; a narrow key of an admin of the box neither."""
    name = here.fresh("gpus")
    with here.database.write() as session:
        nodes.register(session, name, "worker-g", "0.1.0", [{"id": f"cpu-{n}", "kind": "cpu"} for n in range(3)], [])
    slots = [f"{name}/cpu-{number}" for number in range(3)]
    narrow = here.caller(boss.name, Role.MEMBER, Scope.WRITE, box_admin=True)
    for who in (member, admin, narrow):
        for body in ({"gpus": slots[:2]}, {"gpus": slots[:1], "until": "2099-01-01T00:00:00Z"}):
            assert code(here.ask("POST", "/holds", who.key, json=body), 422 if "until" in body else 409) in (
                "bad_time",
                "too_many_holds",
            )
        (held,) = ok(here.ask("POST", "/holds", who.key, json={"gpus": slots[:1]}), 201)["data"]
        assert 11.9 * 3600 < seconds(held["until"]) - seconds(held["since"]) < 12.1 * 3600
        ok(here.ask("POST", "/holds/release", who.key, json={"gpus": slots[:1]}))
    held = ok(here.ask("POST", "/holds", boss.key, json={"gpus": slots}), 201)["data"]
    assert [one["until"] for one in held] == [None] * 3
    ok(here.ask("POST", "/holds/release", boss.key, json={"gpus": slots}))


# -- keys


@pytest.mark.both_databases
def test_a_key_allows_what_its_user_and_its_scope_both_do(here: World, member: Caller) -> None:
    made = ok(here.ask("POST", "/keys", member.key, json={"name": "ci", "scope": "read"}), 201)
    assert KEY.fullmatch(made["key"]) and made["key"].split("_")[1] == made["prefix"]
    me = ok(here.ask("GET", "/me", made["key"]))
    assert (me["user"]["name"], me["role"], me["scope"], me["key"]) == (member.name, "member", "read", made["id"])
    assert here.ask("GET", "/jobs", made["key"]).status_code == 200
    assert code(here.ask("POST", "/jobs", made["key"], json={}), 403) == "missing_scope"
    assert code(here.ask("POST", "/keys", made["key"], json={}), 403) == "missing_scope"
    assert ok(here.ask("POST", "/keys", member.key, json={}), 201)["scope"] == "write", "all that a member may"
    assert code(here.ask("POST", "/keys", member.key, json={"scope": "admin"}), 403) == "missing_scope"
    listed = ok(here.ask("GET", "/keys", member.key))["data"]
    assert [(key["name"], key["scope"]) for key in listed] == [("key", "write"), ("ci", "read"), ("k", "write")]
    assert all("key" not in row and "sha256" not in row for row in listed)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"scope": "everything"}, "scope"),
        ({"expires_in_days": 0}, "expires_in_days"),
        ([], None),
    ],
)
def test_a_wish_that_makes_no_sense_names_its_field(here: World, member: Caller, body: Any, field: str | None) -> None:
    reply = here.ask("POST", "/keys", member.key, json=body)
    assert code(reply, 422) == "invalid_request"
    assert reply.json()["error"]["field"] == field


def test_keys_of_others_are_for_admins(here: World, admin: Caller, member: Caller, boss: Caller) -> None:
    assert code(here.ask("POST", "/keys", member.key, json={"user": admin.name}), 403) == "missing_role"
    assert code(here.ask("GET", "/keys?all=true", member.key), 403) == "missing_role"
    theirs = ok(here.ask("POST", "/keys", admin.key, json={"user": member.name}), 201)
    assert (theirs["user"]["name"], theirs["scope"]) == (member.name, "write")
    assert ok(here.ask("GET", "/me", theirs["key"]))["user"]["id"] == member.user_id
    # An admin of the project does not become admin of the box by a key of somebody who is.
    assert code(here.ask("POST", "/keys", admin.key, json={"user": boss.name, "scope": "box"}), 403) == "missing_scope"
    assert ok(here.ask("POST", "/keys", admin.key, json={"user": boss.name}), 201)["scope"] == "admin"
    # Nor does a key say more than its user may.
    useless = here.ask("POST", "/keys", admin.key, json={"user": member.name, "scope": "admin"})
    assert (code(useless, 422), useless.json()["error"]["field"]) == ("invalid_request", "scope")
    nobody = here.ask("POST", "/keys", admin.key, json={"user": "owner of rivals"})
    assert nobody.status_code == 422 and "not a member" in nobody.text
    # Members see and touch their own alone.
    hidden = here.ask("DELETE", f"/keys/{ok(here.ask('GET', '/me', admin.key))['key']}", member.key)
    assert code(hidden, 404) == "not_found"
    assert {key["user"]["name"] for key in ok(here.ask("GET", "/keys", member.key))["data"]} == {member.name}
    everybodys = ok(here.ask("GET", "/keys?all=true&limit=200", admin.key))["data"]
    assert {member.name, admin.name, boss.name} <= {key["user"]["name"] for key in everybodys}
    assert ok(here.ask("DELETE", f"/keys/{theirs['id']}", admin.key))["state"] == "revoked"
    assert code(here.ask("GET", "/me", theirs["key"]), 401) == "invalid_api_key"


def test_admins_of_the_box_make_the_first_key_of_a_project(here: World, boss: Caller) -> None:
    name, who = here.fresh("project"), here.fresh("who")
    ok(here.ask("POST", "/users", boss.key, json={"name": who}), 201)
    made = ok(here.ask("POST", "/projects", boss.key, json={"name": name, "admin": who}), 201)
    key = ok(here.ask("POST", "/keys", boss.key, json={"user": who, "project": name}), 201)
    assert (key["scope"], key["project"]["id"]) == ("admin", made["id"])
    me = ok(here.ask("GET", "/me", key["key"]))
    assert (me["user"]["name"], me["project"]["name"], me["role"], me["box_admin"]) == (who, name, "admin", False)
    assert [row["id"] for row in ok(here.ask("GET", f"/keys?project={name}", boss.key))["data"]] == [key["id"]]
    assert code(here.ask("POST", "/users", boss.key, json={"name": who}), 409) == "name_taken"
    assert code(here.ask("POST", "/projects", boss.key, json={"name": name}), 409) == "name_taken"
    assert code(here.ask("POST", "/users", boss.key, json={"name": "user-" + "0" * 26}), 422) == "invalid_request"
    # What looks after the box does not look into it.
    assert ok(here.ask("GET", "/jobs", key["key"]))["data"] == []
    assert here.ask("GET", "/projects", key["key"]).json()["data"][0]["id"] == made["id"]


@pytest.mark.both_databases
def test_a_key_ends_when_it_said_it_would(here: World, member: Caller) -> None:
    made = ok(here.ask("POST", "/keys", member.key, json={"expires_in_days": 2}), 201)
    assert abs(seconds(made["expires_at"]) - time.time() - 2 * DAY) < 60
    # What it makes ends with it, or before.
    child = ok(here.ask("POST", "/keys", made["key"], json={}), 201)
    assert child["expires_at"] == made["expires_at"]
    longer = here.ask("POST", "/keys", made["key"], json={"expires_in_days": 3})
    assert (code(longer, 422), longer.json()["error"]["field"]) == ("invalid_request", "expires_in_days")
    with here.database.write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == made["id"]).values(expires_at=db_now() - 1))
    over = here.ask("GET", "/jobs", made["key"])
    assert code(over, 401) == "expired_api_key"
    wrong = made["key"][:-1] + ("0" if made["key"][-1] != "0" else "1")
    assert code(here.ask("GET", "/jobs", wrong), 401) == "invalid_api_key", "only who has all of it is told"
    states = {key["id"]: key["state"] for key in ok(here.ask("GET", "/keys", member.key))["data"]}
    assert (states[made["id"]], states[child["id"]]) == ("expired", "works")


@pytest.mark.both_databases
def test_rotation_leaves_time_to_change_over(here: World, member: Caller) -> None:
    old = ok(here.ask("POST", "/keys", member.key, json={"name": "ci", "scope": "read", "expires_in_days": 90}), 201)
    assert code(here.ask("POST", f"/keys/{old['id']}/rotate", old["key"]), 403) == "missing_right"
    rights = {"name": "ci", "scope": "read", "rights": ["self_rotate"], "expires_in_days": 90}
    old = ok(here.ask("POST", "/keys", member.key, json=rights), 201)
    new = ok(here.ask("POST", f"/keys/{old['id']}/rotate?overlap_hours=1", old["key"]), 201)
    assert (new["name"], new["scope"], new["rotated_from"]) == ("ci", "read", old["id"])
    assert new["expires_at"] == old["expires_at"], "the same end"
    for key in (old, new):
        assert here.ask("GET", "/jobs", key["key"]).status_code == 200
    listed = {key["id"]: key for key in ok(here.ask("GET", "/keys", member.key))["data"]}
    assert abs(seconds(listed[old["id"]]["expires_at"]) - time.time() - 3600) < 60
    assert code(here.ask("POST", f"/keys/{old['id']}/rotate", old["key"]), 409) == "already_rotated"
    at_once = ok(here.ask("POST", f"/keys/{new['id']}/rotate?overlap_hours=0", new["key"]), 201)
    assert code(here.ask("POST", f"/keys/{new['id']}/rotate", member.key), 409) == "key_is_over"
    # One that expires does not take over one that does not.
    forever = ok(here.ask("POST", "/keys", member.key, json={"scope": "read"}), 201)["id"]
    lent = ok(here.ask("POST", "/keys", member.key, json={"expires_in_days": 1}), 201)["key"]
    assert code(here.ask("POST", f"/keys/{forever}/rotate", lent), 422) == "invalid_request"
    assert code(here.ask("POST", f"/keys/{forever}/rotate", at_once["key"]), 403) == "missing_right"
    # A key of small scope neither takes over nor ends a larger one of the same user.
    large = ok(here.ask("GET", "/me", member.key))["key"]
    small = ok(here.ask("POST", "/keys", member.key, json={"scope": "read", "rights": ["make_keys"]}), 201)["key"]
    assert code(here.ask("POST", f"/keys/{large}/rotate", small), 403) == "missing_scope"
    assert code(here.ask("DELETE", f"/keys/{large}", at_once["key"]), 403) == "missing_scope"
    for _ in range(2):
        assert ok(here.ask("DELETE", f"/keys/{at_once['id']}", member.key))["state"] == "revoked"
    assert code(here.ask("GET", "/jobs", at_once["key"]), 401) == "invalid_api_key"


@pytest.mark.both_databases
def test_last_use_is_noted_without_a_write_a_request(here: World, member: Caller) -> None:
    uses: LastUse = here.app.state.eft.last_use

    def last() -> float | None:
        with here.database.read() as session:
            query = select(ApiKey.last_used_at).where(ApiKey.owner_id == member.user_id)
            return session.execute(query).scalar_one()

    uses.write()
    for _ in range(3):
        assert here.ask("GET", "/jobs", member.key).status_code == 200
    assert last() is None, "no request has waited for it"
    uses.write()
    first = last()
    assert first is not None and abs(first - time.time()) < 60
    uses.write()
    assert last() == first, "nothing new, nothing written"
    assert code(here.ask("GET", "/users", member.key), 403) == "box_admin_only"
    uses.write()
    assert last() > first, "a refusal is a use, too"


@pytest.mark.both_databases
def test_a_database_that_is_away_costs_no_last_use(here: World, member: Caller, tmp_path: Path) -> None:
    from core.db.engine import Database

    with here.database.read() as session:
        principal = authenticate(session, member.key)
    assert principal is not None
    uses = LastUse(Database(f"sqlite:///{tmp_path / 'empty.db'}"), seconds=0.01)
    uses.note(principal)
    uses.start()
    for _ in range(100):  # the thread tries again and again meanwhile
        assert list(uses._seen) == [principal.key_id], "kept until it is written"
        time.sleep(0.002)
    uses._database = here.database
    deadline = time.monotonic() + 90
    while uses._seen:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    uses.close()
    with here.database.read() as session:
        assert session.get_one(ApiKey, principal.key_id).last_used_at is not None


def test_a_stream_does_not_outlive_its_key(here: World, member: Caller) -> None:
    app = here.app.state.eft
    with here.database.read() as session:
        principal = authenticate(session, member.key)
    assert principal is not None

    async def read(*, revoke_after: int) -> list[bytes]:
        seen = []
        async for encoded in while_allowed(app, principal, app.hub.follow(here.lab.job, 0), seconds=0):
            seen.append(encoded)
            if len(seen) == revoke_after:
                with here.database.write() as session:
                    session.execute(update(ApiKey).where(ApiKey.id == principal.key_id).values(revoked_at=db_now()))
        return seen

    whole = asyncio.run(read(revoke_after=0))
    assert whole[-1].startswith(b"event: end")
    assert asyncio.run(read(revoke_after=2)) == whole[:2]


def test_what_a_role_can_make_use_of() -> None:
    assert [widest(role, False) for role in (None, *Role)] == [Scope.READ, Scope.READ, Scope.WRITE, Scope.ADMIN]
    assert {widest(role, True) for role in (None, *Role)} == {Scope.BOX}


def test_the_command_on_the_box_itself(here: World) -> None:
    """It needs no key, makes who is new, and leaves others what they are."""

    def made(project: str, user: str, **more: Any) -> dict[str, Any]:
        key = keys.create(here.database, project=project, user=user, name="local", **more)
        me: dict[str, Any] = ok(here.ask("GET", "/me", key))
        return me

    project, first, second = here.fresh("project"), here.fresh("first"), here.fresh("second")
    me = made(project, first)
    assert (me["role"], me["scope"], me["box_admin"]) == ("admin", "admin", False), "root looks after the box"
    assert [made(project, second)[field] for field in ("role", "scope")] == ["member", "write"]
    assert made(project, second, role=Role.VIEWER)["role"] == "viewer"
    assert [made(project, second)[field] for field in ("role", "scope")] == ["viewer", "read"], "as they were left"
    assert made(project, first, scope=Scope.READ)["scope"] == "read"
    assert abs(seconds(made(project, first, days=1)["key_expires_at"]) - time.time() - DAY) < 60
    assert made(project, first, box_admin=True)["scope"] == "box"
    gone = here.caller(here.fresh("gone"), Role.MEMBER, Scope.WRITE)
    here.disable(gone)
    with pytest.raises(Conflict, match="disabled"):
        made("lab", gone.name)
    with here.database.read() as session:
        project_id = me["project"]["id"]
        told = session.execute(select(Audit).where(Audit.project_id == project_id).order_by(Audit.id)).scalars().all()
    assert [entry.action for entry in told][:3] == ["project.create", "member.set", "key.create"]
    assert {(entry.actor_id, entry.key_id) for entry in told} == {(None, None)}
    rows = ok(here.ask("GET", f"/audit?project={project}", _boss_key(here)))["data"]
    assert {row["actor"] for row in rows} == {None}


def _boss_key(here: World) -> str:
    return here.caller(here.fresh("boss"), None, Scope.BOX, box_admin=True).key


# -- users, projects, members


def test_roles_hold_from_the_next_request_on(here: World, admin: Caller, member: Caller) -> None:
    where = f"/projects/{here.lab.name}/members"
    file = here.file(here.lab.owner)
    body = {"model": MODEL, "data": file}
    job = ok(here.ask("POST", "/jobs", member.key, json=body), 201)["id"]
    assert ok(here.ask("PUT", f"{where}/{member.name}", admin.key, json={"role": "viewer"}))["role"] == "viewer"
    assert code(here.ask("POST", "/jobs", member.key, json=body), 403) == "missing_role"
    assert here.ask("GET", f"/jobs/{job}", member.key).status_code == 200
    colleague = here.caller(here.fresh("colleague"), Role.MEMBER, Scope.WRITE)
    cancelled = ok(here.ask("POST", f"/jobs/{job}/cancel", colleague.key))
    assert cancelled["reason"] == f"cancelled by {colleague.name}"
    roles = {one["user"]["name"]: one["role"] for one in ok(here.ask("GET", where, member.key))["data"]}
    assert (roles[member.name], roles[admin.name]) == ("viewer", "admin")
    assert ok(here.ask("DELETE", f"{where}/{member.name}", admin.key))["removed"] is True
    assert code(here.ask("GET", "/jobs", member.key), 401) == "invalid_api_key", "the key went with it"
    assert code(here.ask("DELETE", f"{where}/{member.name}", admin.key), 404) == "not_found"
    ok(here.ask("PUT", f"{where}/{member.name}", admin.key, json={"role": "member"}))
    assert here.ask("GET", "/jobs", member.key).status_code == 401, "and does not come back with its user"
    assert code(here.ask("PUT", f"{where}/nobody", admin.key, json={"role": "member"}), 404) == "not_found"
    assert code(here.ask("PUT", f"{where}/{member.name}", admin.key, json={"role": "king"}), 422) == "invalid_request"


def test_somebody_always_looks_after_it(here: World, boss: Caller) -> None:
    name = here.fresh("alone")
    where = ok(here.ask("POST", "/projects", boss.key, json={"name": name}), 201)["id"]
    for change in (
        ("PUT", f"/projects/{where}/members/{boss.name}", {"json": {"role": "member"}}),
        ("DELETE", f"/projects/{where}/members/{boss.name}", {}),
    ):
        assert code(here.ask(change[0], change[1], boss.key, **change[2]), 409) == "last_admin"
    for user in ok(here.ask("GET", "/users", boss.key))["data"]:
        if user["box_admin"] and user["id"] != boss.user_id:
            row = ok(here.ask("PATCH", f"/users/{user['id']}", boss.key, json={"box_admin": False}))
            assert row["box_admin"] is False
    for change in ({"box_admin": False}, {"disabled": True}):
        assert code(here.ask("PATCH", f"/users/{boss.name}", boss.key, json=change), 409) == "last_admin"
    ok(here.ask("PATCH", "/users/root", boss.key, json={"box_admin": True}))


@pytest.mark.both_databases
def test_two_admins_cannot_remove_one_another(here: World) -> None:
    """At the same moment, in two connections: one of them stays."""
    with here.database.write() as session:
        project = people.add_project(session, None, here.fresh("duel"))
        duellists = [people.add_user(session, None, here.fresh("duellist")) for _ in range(2)]
        for user in duellists:
            people.set_member(session, None, project.id, user, Role.ADMIN)
    together = threading.Barrier(2)

    def remove(user: User) -> str:
        try:
            with here.database.write() as session:
                if not here.database.is_sqlite:  # which lets one writer in at a time: the other waits before this
                    session.execute(select(Project.id))
                    together.wait(90)
                people.remove_member(session, None, project.id, user)
                return "removed"
        except Conflict as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(remove, duellists)) == ["last_admin", "removed"]


def test_a_disabled_user_is_out_and_can_come_back(here: World, boss: Caller, member: Caller) -> None:
    row = ok(here.ask("PATCH", f"/users/{member.name}", boss.key, json={"disabled": True}))
    assert row["disabled_at"] is not None
    assert code(here.ask("GET", "/jobs", member.key), 401) == "invalid_api_key"
    assert ok(here.ask("PATCH", f"/users/{member.name}", boss.key, json={"disabled": False}))["disabled_at"] is None
    assert here.ask("GET", "/jobs", member.key).status_code == 200


# -- audit


@pytest.mark.both_databases
def test_every_change_is_in_the_audit_and_in_its_transaction(here: World, admin: Caller, boss: Caller) -> None:
    name = here.fresh("audited")
    mine = here.caller(name, Role.MEMBER, Scope.WRITE)
    mine_id = ok(here.ask("GET", "/me", mine.key))["key"]
    numbers: set[str] = set()

    def ask(method: str, path: str, key: str = mine.key, **more: Any) -> Any:
        reply = here.ask(method, path, key, headers={"x-request-id": "job-mine"}, **more)
        assert reply.status_code < 300, reply.text
        numbers.add(reply.headers["x-request-id"])
        return reply.json()

    file = ask("POST", "/files", files={"file": ("rows.jsonl", b'{"text": "a"}\n')})["id"]
    job = ask("POST", "/jobs", json={"model": MODEL, "data": file})["id"]
    ask("POST", "/jobs?dry_run=true", json={"model": MODEL, "data": file})
    for verb in ("pause", "pause", "resume", "cancel"):
        ask("POST", f"/jobs/{job}/{verb}")
    again = ask("POST", f"/jobs/{job}/retry")["id"]
    ask("POST", f"/jobs/{again}/cancel")
    preview = ask("POST", f"/files/{file}/preview", json={"model": MODEL})["id"]
    with here.database.write() as session:  # nobody runs it here
        session.execute(update(Job).where(Job.id == preview).values(status="cancelled"))
    ask("DELETE", f"/files/{file}")
    key = ask("POST", "/keys", json={"name": "second"})
    ask("POST", f"/keys/{key['id']}/rotate")
    ask("DELETE", f"/keys/{key['id']}")

    entries = ok(here.ask("GET", f"/audit?key={mine_id}&limit=200", admin.key))["data"]
    assert [entry["action"] for entry in reversed(entries)] == [
        "file.upload", "job.submit", "job.pause", "job.resume", "job.cancel", "job.submit", "job.cancel",
        "preview.ask", "file.delete", "key.create", "key.rotate", "key.revoke", "key.revoke",
    ]  # fmt: skip
    with here.database.read() as session:
        used = session.execute(select(ApiKey.id).where(ApiKey.owner_id == mine.user_id).order_by(ApiKey.id)).scalars()
        first = next(iter(used))
    for entry in entries:
        assert (entry["actor"]["name"], entry["key"], entry["project"]["name"]) == (name, first, "lab")
        assert entry["request_id"] in numbers, "ours, not what the client calls it"
    one = entries[0]["request_id"]
    found = ok(here.ask("GET", f"/audit?request_id={one}&limit=200", admin.key))["data"]
    assert found == [entry for entry in entries if entry["request_id"] == one]
    assert {entry["target"] for entry in entries} >= {file, job, again, preview, key["id"]}
    # What fails leaves nothing: the entry is in the transaction of the change.
    refused = here.ask("DELETE", f"/files/{file}", mine.key)
    assert refused.status_code == 404
    with here.database.write() as session, pytest.raises(RuntimeError, match="as if"), session.begin_nested():
        lost = submit(session, here.lab.owner, here.spec(here.lab.file)).id
        raise RuntimeError("as if the process had ended")
    with here.database.read() as session:
        assert session.execute(select(Audit).where(Audit.request_id == refused.headers["x-request-id"])).all() == []
        assert session.execute(select(Audit).where(Audit.target == lost)).all() == []

    # Admins of the box do not read a project's jobs and files there either, unless they are its admins.
    shown = {e["action"] for e in ok(here.ask("GET", f"/audit?key={mine_id}&limit=200", boss.key))["data"]}
    assert shown == {"key.create", "key.rotate", "key.revoke"}


@pytest.mark.both_databases
def test_the_audits_filters_and_pages(here: World, admin: Caller, boss: Caller) -> None:
    who = here.fresh("filtered")
    ok(here.ask("POST", "/users", boss.key, json={"name": who}), 201)
    for role in ("viewer", "member", "admin", "viewer"):
        ok(here.ask("PUT", f"/projects/lab/members/{who}", admin.key, json={"role": role}))
    ok(here.ask("POST", "/nodes/box/drain?reason=fan", boss.key))
    ok(here.ask("POST", "/nodes/box/undrain", boss.key))

    def ask(key: str, **filters: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        after = None
        while True:
            page = ok(
                here.ask("GET", "/audit", key, params={"limit": 2, **filters} | ({"after": after} if after else {}))
            )
            assert len(page["data"]) <= 2
            rows += page["data"]
            after = page["next"]
            if not page["has_more"]:
                return rows

    changes = ask(admin.key, actor=admin.name, action="member.set")
    assert [entry["data"]["role"] for entry in changes] == ["viewer", "admin", "member", "viewer"], "newest first"
    assert [entry["data"]["before"] for entry in changes] == ["admin", "member", "viewer", None]
    target = changes[0]["target"]
    assert [e["id"] for e in ask(admin.key, target=target)] == [e["id"] for e in changes]
    assert ask(admin.key, action="node.") == [], "what concerns the box is not a project's"
    drains = ask(boss.key, action="node.", actor=boss.name)
    assert [(e["action"], e["target"], e["project"]) for e in drains] == [
        ("node.undrain", "box", None),
        ("node.drain", "box", None),
    ]
    assert drains[1]["data"] == {"reason": "fan"}
    moment = changes[1]["time"]
    assert [e["id"] for e in ask(admin.key, target=target, since=moment)] == [e["id"] for e in changes[:2]]
    assert [e["id"] for e in ask(admin.key, target=target, until=moment)] == [e["id"] for e in changes[2:]]
    assert {e["project"]["name"] for e in ask(boss.key, project="rivals")} == {"rivals"}
    assert code(here.ask("GET", "/audit?project=rivals", admin.key), 404) == "not_found"
    foreign = ask(boss.key, project="rivals")[0]["id"]
    for cursor in (foreign, "audit-" + "0" * 26):
        assert code(here.ask("GET", f"/audit?after={cursor}", admin.key), 400) == "unknown_cursor"


# -- lists


@pytest.mark.both_databases
def test_no_list_tells_of_another_projects_things(here: World, admin: Caller, boss: Caller) -> None:
    """Of every list that the application has: with jobs of the other project that wait, run and are over."""
    rivals = here.rivals
    with here.database.write() as session:
        spec = here.spec(rivals.file).model_copy(update={"name": "SECRET name"})
        for job in session.execute(select(Job).where(Job.status == "queued", Job.kind == "train")).scalars():
            cancel(session, Actor(job.owner_id, job.project_id), job.id)
        runs = submit(session, rivals.owner, spec).id
    with here.database.write() as session:
        won = claim(session, "worker-x", "box", Slot("prepare-9", "prepare"), 600)
        assert won is not None and won.token.job_id == runs
        finish(session, won.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
        won = claim(session, "worker-x", "box", Slot("cpu", "cpu"), 600)
        assert won is not None and won.token.job_id == runs
        waits = submit(session, rivals.owner, spec).id
        later = submit(session, rivals.owner, spec).id
        values = {"reason": "SECRET reason", "not_before": db_now() + 600}
        session.execute(update(Job).where(Job.id == later).values(**values))
    secrets = {"SECRET", runs, waits, later, rivals.job, rivals.file, rivals.preview}
    lists = sorted(path for method, path in here.app.state.policies if method == "GET" and "{" not in path)
    for path in lists:
        query = {"/gpus/history": "?gpu=box/cpu"}.get(path, "")
        for who in (admin, boss):
            text = here.ask("GET", path + query, who.key).text
            shown = {secret for secret in secrets if secret in text}
            if who is admin:
                shown |= {word for word in ("rivals", rivals.id, rivals.owner.user_id, rivals.key) if word in text}
            assert not shown, (path, who.name, shown)
    assert {"/queue", "/gpus", "/gpus/history", "/nodes", "/jobs", "/files", "/keys", "/audit", "/usage"} <= set(lists)
    waiting = ok(here.ask("GET", "/queue", admin.key))["data"]
    assert len(waiting) >= 2, "its places are there, without names"


# -- by the command


def test_by_the_command(api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("EFT_URL", api.url)

    def run(*arguments: str, key: str = api.key, status: int = 0) -> Any:
        """In this process: a start of the command costs more than all it does."""
        done = CliRunner().invoke(app, arguments, env={"EFT_API_KEY": key or None})
        assert done.exit_code == status, done.output
        return done

    said = eft(api, "whoami").stdout
    assert said.startswith("ada (admin of the box), admin in project lab; key key-") and "scope box" in said
    assert run("users", "create", "grace").stdout.startswith("user-")
    assert run("projects", "add", "grace", "--role", "viewer").stdout == "grace viewer\n"
    assert re.search(r"grace\s+viewer", run("projects", "members").stdout)
    made = run("keys", "create", "laptop", "--user", "grace", "--days", "30")
    key = made.stdout.strip()
    assert KEY.fullmatch(key), "the key alone, for pipes"
    assert "scope read" in made.stderr and key not in made.stderr
    assert json.loads(run("whoami", "--json", key=key).stdout)["role"] == "viewer"
    assert "admins of the box" in run("projects", "create", "more", key=key, status=5).stderr
    # A key in the file of `eft login` is rotated in place.
    path = write_config(api.url, key)
    assert "EFT_API_KEY goes before it" in run("keys", "rotate", "--save", status=2).stderr
    assert run("keys", "rotate", "--save", "--overlap-hours", "0", key="").stdout == ""
    assert path.stat().st_mode & 0o777 == 0o600 and key not in path.read_text()
    assert json.loads(run("whoami", "--json", key="").stdout)["user"]["name"] == "grace"
    prefix = re.search(r"eft_(\w{8})_", path.read_text())
    assert prefix is not None
    assert re.fullmatch(r"key-\w{26} revoked\n", run("keys", "revoke", prefix[1]).stdout)
    assert re.search(rf"{prefix[1]}\s+laptop\s+grace\s+read\s+revoked", run("keys", "list", "--all").stdout)
    entries = run("audit", "--action", "key.", "-n", "3", "--json").stdout
    assert [row["action"] for row in json.loads(entries)["data"]] == ["key.revoke", "key.rotate", "key.create"]
    assert run("users", "change", "grace", "--disable").stdout == "grace disabled\n"
    assert key not in api.log() and api.key not in api.log()
