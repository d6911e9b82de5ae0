"""Revoked means gone: what was made with a key ends with it, and a key that was rotated away is not used again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from api.auth import families, keyring, keys, service
from api.auth.policy import Right, Role, Scope
from api.auth.schemas import KeyWish
from core import HOME
from core.db.engine import db_now
from core.db.tables import ApiKey, Audit
from core.errors import Conflict, Unauthorized
from tests.support.world import Caller, World, world

DAY = 86400


@pytest.fixture(scope="module")
def here(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("families") / "data"
    with world(folder, database_url, key_longest_days=100, keys_per_member=12) as made:
        yield made


@pytest.fixture
def member(here: World) -> Caller:
    return here.caller(here.fresh("member"), Role.MEMBER, Scope.WRITE)


def made(here: World, key: str, **wish: Any) -> dict[str, Any]:
    reply = here.ask("POST", "/keys", key, json=wish)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def rotated(here: World, key: str, key_id: str, **query: Any) -> dict[str, Any]:
    reply = here.ask("POST", f"/keys/{key_id}/rotate", key, params=query)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def mine(here: World, key: str) -> str:
    return str(here.ask("GET", "/me", key).json()["key"])


def works(here: World, *keys: dict[str, Any]) -> list[bool]:
    return [here.ask("GET", "/me", key["key"]).status_code == 200 for key in keys]


def code(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["code"])


def audited(here: World, action: str, target: str) -> list[dict[str, Any]]:
    with here.database.read() as session:
        query = select(Audit.data).where(Audit.action == action, Audit.target == target)
        return list(session.execute(query).scalars())


@pytest.mark.both_databases
def test_what_was_made_with_a_key_ends_with_it(here: World, member: Caller) -> None:
    stolen = made(here, member.key)
    child = made(here, stolen["key"])
    grandchild = made(here, child["key"], scope="read")
    successor = rotated(here, grandchild["key"], grandchild["id"]) if grandchild["rights"] else None
    assert successor is None, "a key with a scope has no rights but those it is given"
    successor = rotated(here, child["key"], grandchild["id"])
    other = made(here, member.key)
    assert [key["made_with"] for key in (child, grandchild, successor)] == [stolen["id"], child["id"], child["id"]]
    reply = here.ask("DELETE", f"/keys/{stolen['id']}", member.key).json()
    assert reply["state"] == "revoked"
    assert reply["also_revoked"] == sorted(key["id"] for key in (child, grandchild, successor))
    assert works(here, stolen, child, grandchild, successor, other) == [False] * 4 + [True]
    assert audited(here, "key.revoke", stolen["id"])[0]["revoked_with_it"] == reply["also_revoked"]
    assert audited(here, "key.revoke", successor["id"]) == [{"revoked_with": stolen["id"]}]
    again = here.ask("DELETE", f"/keys/{stolen['id']}", member.key).json()
    assert again["also_revoked"] == [] and len(audited(here, "key.revoke", stolen["id"])) == 1


def test_a_key_can_be_revoked_alone(here: World, member: Caller) -> None:
    old = made(here, member.key)
    child, new = made(here, old["key"]), rotated(here, old["key"], old["id"])
    reply = here.ask("DELETE", f"/keys/{old['id']}?alone=true", member.key).json()
    assert reply["also_revoked"] == []
    assert works(here, old, child, new) == [False, True, True]
    # What it left can still be ended by it.
    reply = here.ask("DELETE", f"/keys/{old['id']}", member.key).json()
    assert reply["also_revoked"] == sorted([child["id"], new["id"]])


def test_the_command_on_the_box_ends_a_family_too(
    here: World, member: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = made(here, member.key)
    child = made(here, parent["key"])
    with here.database.write() as session:
        key_id = service.by_prefix(session, parent["prefix"])
        assert key_id == parent["id"]
        assert families.end(session, None, key_id) == [child["id"]]
    assert works(here, parent, child) == [False, False]


@pytest.mark.both_databases
def test_a_key_that_was_rotated_away_ends_its_family_when_it_comes_back(here: World, member: Caller) -> None:
    first = made(here, member.key)
    child = made(here, first["key"])
    second = rotated(here, first["key"], first["id"], overlap_hours=1)
    assert works(here, first, second) == [True, True], "during the overlap both work"
    third = rotated(here, second["key"], second["id"], overlap_hours=1)
    with here.database.write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == second["id"]).values(expires_at=db_now() - 1))
    assert works(here, third) == [True]
    assert code(here.ask("GET", "/jobs", second["key"]), 401) == "reused_api_key"
    assert works(here, first, child, third) == [False] * 3, "the whole chain, and what was made with any of it"
    assert code(here.ask("GET", "/jobs", second["key"]), 401) == "invalid_api_key"
    told = audited(here, "key.reuse", second["id"])
    assert [entry["revoked_with_it"] for entry in told] == [sorted([first["id"], child["id"], third["id"]])]
    assert here.ask("GET", "/me", member.key).status_code == 200, "who made it is not of the family"
    assert all(key["key"] not in str(told) for key in (first, second, third))


def test_a_key_that_has_only_expired_ends_nothing(here: World, member: Caller) -> None:
    lent = made(here, member.key, expires_in_days=1)
    child = made(here, lent["key"])
    with here.database.write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == lent["id"]).values(expires_at=db_now() - 1))
    assert code(here.ask("GET", "/jobs", lent["key"]), 401) == "expired_api_key"
    assert works(here, child) == [True]


def test_rotation_keeps_the_end_unless_an_admin_gives_a_later_one(here: World, member: Caller) -> None:
    admin = here.caller(here.fresh("admin"), Role.ADMIN, Scope.ADMIN)
    key = made(here, member.key, expires_in_days=2)
    end = key["expires_at"]
    for _ in range(3):
        key = rotated(here, key["key"], key["id"])
        assert key["expires_at"] == end
    later = here.ask("POST", f"/keys/{key['id']}/rotate?expires_in_days=3", key["key"])
    assert (code(later, 422), later.json()["error"]["field"]) == ("invalid_request", "expires_in_days")
    member_later = here.ask("POST", f"/keys/{key['id']}/rotate?expires_in_days=3", member.key)
    assert code(member_later, 422) == "invalid_request", "nor with another key of theirs"
    sooner = rotated(here, key["key"], key["id"], expires_in_days=1)
    assert sooner["expires_at"] < end
    assert rotated(here, admin.key, sooner["id"], expires_in_days=30)["expires_at"] > end
    # An admin whose own key ends gives no more than that has.
    lent = made(here, admin.key, expires_in_days=5)
    beyond = here.ask("POST", f"/keys/{lent['id']}/rotate?expires_in_days=6", lent["key"])
    assert code(beyond, 422) == "invalid_request"


def test_the_box_bounds_the_life_of_keys(here: World, member: Caller) -> None:
    key = made(here, member.key)
    with here.database.read() as session:
        row = session.get_one(ApiKey, key["id"])
    assert row.expires_at is not None and abs(row.expires_at - time.time() - 100 * DAY) < 60
    longer = here.ask("POST", "/keys", member.key, json={"expires_in_days": 101})
    assert (code(longer, 422), longer.json()["error"]["field"]) == ("invalid_request", "expires_in_days")
    assert "EFT_KEY_LONGEST_DAYS" in longer.text
    forever = mine(here, member.key)  # of before that was set
    assert rotated(here, member.key, forever, overlap_hours=720)["expires_at"] is not None


def test_rights_are_handed_down_and_never_widened(here: World, member: Caller) -> None:
    both = ["make_keys", "self_rotate"]
    assert made(here, member.key)["rights"] == both, "a person's key"
    machine = made(here, member.key, scope="write")
    assert machine["rights"] == []
    assert code(here.ask("POST", "/keys", machine["key"], json={}), 403) == "missing_right"
    assert code(here.ask("POST", f"/keys/{machine['id']}/rotate", machine["key"]), 403) == "missing_right"
    turning = made(here, member.key, scope="write", rights=["self_rotate"])
    assert rotated(here, turning["key"], turning["id"])["rights"] == ["self_rotate"]
    making = made(here, member.key, rights=["make_keys"])
    assert made(here, making["key"])["rights"] == ["make_keys"]
    assert code(here.ask("POST", "/keys", making["key"], json={"rights": both}), 403) == "missing_right"
    assert here.ask("GET", "/me", making["key"]).json()["rights"] == ["make_keys"]
    with here.database.write() as session:  # as an earlier version left it
        session.execute(update(ApiKey).where(ApiKey.id == machine["id"]).values(rights=None))
    assert here.ask("GET", "/me", machine["key"]).json()["rights"] == both
    assert here.ask("DELETE", f"/keys/{turning['id']}", turning["key"]).status_code in (200, 401)


@pytest.mark.both_databases
def test_a_user_has_so_many_keys_in_a_project(here: World, member: Caller) -> None:
    boss = here.caller(here.fresh("boss"), Role.MEMBER, Scope.BOX, box_admin=True)
    admin = here.caller(here.fresh("admin"), Role.ADMIN, Scope.ADMIN)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: _attempt(here, member), range(16)))
    assert results.count(True) == 11, "twelve with the one that they are made with"
    assert code(here.ask("POST", "/keys", member.key, json={}), 409) == "too_many_keys"
    assert code(here.ask("POST", "/keys", admin.key, json={"user": member.name}), 409) == "too_many_keys"
    newest = here.ask("GET", "/keys", member.key).json()["data"][0]["id"]
    successor = rotated(here, member.key, newest, overlap_hours=0)["id"]  # that makes no more of them
    assert here.ask("DELETE", f"/keys/{successor}", member.key).status_code == 200
    made(here, member.key)
    made(here, boss.key)


def _attempt(here: World, member: Caller) -> bool:
    """As the route does it, from a thread of its own."""
    try:
        with here.database.read() as session:
            principal = service.authenticate(session, member.key)
        assert principal is not None
        with here.database.write() as session:
            keyring.create(session, principal, KeyWish(), here.settings)
    except Conflict as error:
        assert error.code == "too_many_keys"
        return False
    return True


@pytest.mark.both_databases
def test_a_key_that_is_being_revoked_makes_no_more(here: World, member: Caller) -> None:
    """It was let in, and revoked before its request came to its transaction."""
    parent = made(here, member.key)
    with here.database.read() as session:
        principal = service.authenticate(session, parent["key"])
    assert principal is not None
    here.ask("DELETE", f"/keys/{parent['id']}", member.key)
    with pytest.raises(Unauthorized), here.database.write() as session:
        keyring.create(session, principal, KeyWish(), here.settings)
    with pytest.raises(Unauthorized), here.database.write() as session:
        keyring.rotate(session, principal, parent["id"], 0, here.settings)


def test_the_checksum_tells_a_key_from_a_text_like_one(here: World, member: Caller) -> None:
    assert re.fullmatch(service.PATTERN, member.key)
    assert service.checksum(member.key[:53]) == member.key[53:]
    wrong = member.key[:20] + ("0" if member.key[20] != "0" else "1") + member.key[21:]
    with here.database.read() as session:
        assert service.authenticate(session, wrong) is None
        assert service.authenticate(session, member.key[:-1]) is None
    # One of an earlier version has none, and works on.
    old = member.key[:53]
    with here.database.write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == mine(here, member.key)).values(sha256=service._hash(old)))
    assert here.ask("GET", "/me", old).status_code == 200


def test_the_page_has_the_pattern_and_how_to_check_it(member: Caller) -> None:
    page = (HOME / "docs" / "security.md").read_text()
    assert service.PATTERN in page
    (source,) = re.findall(r"```python\n(.*?)```", page, re.S)
    found: dict[str, Any] = {}
    exec(source, found)
    assert found["is_key"](member.key)
    assert not found["is_key"](member.key[:-1] + ("0" if member.key[-1] != "0" else "1"))


def test_local_keys_keep_to_the_longest_life(here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bounded:
        key_longest_days = 3.0

    monkeypatch.setattr(keys, "settings", Bounded)
    key = keys.create(here.database, project="lab", user=here.fresh("local"), name="x")
    assert key is not None
    until = here.ask("GET", "/me", key).json()["key_expires_at"]
    assert until is not None
    with pytest.raises(Conflict, match="EFT_KEY_LONGEST_DAYS"):
        keys.create(here.database, project="lab", user=here.fresh("local"), name="x", days=4)
    machine = keys.create(here.database, project="lab", user=here.fresh("local"), name="x", scope=Scope.READ)
    assert machine is not None and here.ask("GET", "/me", machine).json()["rights"] == []
    turning = keys.create(
        here.database, project="lab", user=here.fresh("l"), name="x", scope=Scope.READ, rights=[Right.SELF_ROTATE]
    )
    assert turning is not None and here.ask("GET", "/me", turning).json()["rights"] == ["self_rotate"]
