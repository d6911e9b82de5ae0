"""Quotas of sessions: what is refused, in words; what is still accepted; and what counts no longer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from api.auth.policy import Role, Scope
from core.db.engine import db_now
from core.db.tables import Allocation, Job, SessionOperation, SessionRow
from core.jobs.base.transitions import Token
from core.jobs.lifecycle.sessions import log
from core.jobs.policies import quotas
from tests.support.world import MODEL, Caller, Project, World

ROW = {"tokens": [1, 2], "lengths": [2]}
GONE = dict.fromkeys(("max_sessions", "max_adapters", "session_hours_week", "session_bytes"))


@pytest.fixture
def member(here: World) -> Caller:
    """A member of `lab` who has nothing yet."""
    return here.caller(here.fresh("member"), Role.MEMBER, Scope.WRITE)


@pytest.fixture
def limit(here: World, member: Caller) -> Iterator[Callable[..., None]]:
    """Sets quotas of the member, or of `lab`."""

    def change(scope: quotas.Scope = "owner", **values: float | None) -> None:
        name = member.name if scope == "owner" else here.lab.name
        with here.database.write() as session:
            quotas.change(session, here.lab.owner, scope, name, values)

    yield change
    change("project", **GONE)


class Sender:
    """Sends operations, each with a number of its own."""

    def __init__(self, here: World, key: str) -> None:
        self._here, self._key, self._numbers = here, key, itertools.count(1)

    def open(self) -> Any:
        return self._here.ask("POST", "/sessions", self._key, json={"model": MODEL})

    def send(self, session: str, op: str, *, arrays: Any = None, seq: int | None = None, **fields: Any) -> Any:
        document = {
            "seq": next(self._numbers) if seq is None else seq,
            "operation": {"op": op, "model": "a", **fields},
            "arrays": arrays or {},
        }
        return self._here.ask("POST", f"/sessions/{session}/operations", self._key, json=document)


@pytest.fixture
def sender(here: World, member: Caller) -> Sender:
    return Sender(here, member.key)


def refused(reply: Any, *words: str) -> None:
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "session_quota", reply.text
    assert all(word in reply.json()["error"]["message"] for word in words), reply.text


def opened(sender: Sender) -> str:
    reply = sender.open()
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def closed(here: World, member: Caller, session: str) -> None:
    assert here.ask("POST", f"/sessions/{session}/close", member.key).json()["status"] == "closed"


@pytest.mark.both_databases
@pytest.mark.parametrize("scope", ["owner", "project"])
def test_open_sessions(here: World, member: Caller, sender: Sender, limit: Callable[..., None], scope: Any) -> None:
    first = opened(sender)
    with here.database.read() as session:
        whose = Job.owner_id == member.user_id if scope == "owner" else Job.project_id == here.lab.id
        final = ("cancelled", "failed", "succeeded")
        query = select(Job.id).where(Job.kind == "session", whose, Job.status.not_in(final))
        count = len(session.execute(query).all())
    limit(scope, max_sessions=count)
    who = f"owner {member.name}" if scope == "owner" else "project lab"
    refused(sender.open(), f"{who}: quota of {count} open sessions is used", "`eft quota list`", "eft sessions close")
    with here.database.read() as session:
        assert len(session.execute(query).all()) == count, "nothing of it is left"
    closed(here, member, first)
    assert opened(sender)


def test_the_setting_is_for_who_has_no_quota(here: World, member: Caller, sender: Sender, limit: Any) -> None:
    here.app.state.eft.settings.__dict__["max_sessions"] = 1
    try:
        opened(sender)
        refused(sender.open(), "quota of 1 open sessions is used", "EFT_MAX_SESSIONS")
        limit(max_sessions=2)
        opened(sender)
        refused(sender.open(), "quota of 2 open sessions is used", "`eft quota list`")
    finally:
        here.app.state.eft.settings.__dict__["max_sessions"] = 0


@pytest.mark.both_databases
def test_adapters(here: World, member: Caller, sender: Sender, limit: Callable[..., None]) -> None:
    """Over all open sessions; one that could not be made, was dropped, or whose session has ended counts no longer."""
    one, two = opened(sender), opened(sender)
    limit(max_adapters=2)
    assert sender.send(one, "create", seq=90).status_code == 202
    assert sender.send(two, "create").status_code == 202
    refused(sender.send(two, "create", model="b"), f"owner {member.name}: quota of 2 adapters", "drop an adapter")
    assert sender.send(one, "create", seq=90).status_code == 202, "what was accepted is not refused when it comes again"
    saved = str(here.layout.session(one) / "saved" / "x")
    assert sender.send(one, "load", folder=saved).status_code == 202, "in the place of one that is there"
    refused(sender.send(one, "load", model="c", folder=saved), "quota of 2 adapters")
    assert sender.send(two, "forward", arrays=ROW).status_code == 202, "the rest goes on"
    assert sender.send(two, "drop").status_code == 202
    assert sender.send(two, "create", model="b").status_code == 202
    with here.database.write() as session:
        last = select(SessionRow.positions).where(SessionRow.id == two).scalar_subquery()
        session.execute(
            update(SessionOperation)
            .where(SessionOperation.session_id == two, SessionOperation.position == last)
            .values(error={"code": "x"}, done_at=db_now())
        )
    assert sender.send(two, "create", model="d").status_code == 202
    refused(sender.send(two, "create", model="e"), "quota of 2 adapters")
    closed(here, member, one)
    assert sender.send(two, "create", model="e").status_code == 202


@pytest.mark.both_databases
def test_hours(here: World, member: Caller, sender: Sender, limit: Callable[..., None]) -> None:
    """Of slots that were held, in seven days, and of no slot that only prepares. What is trained can still be saved."""
    session_id = opened(sender)
    hour = 3600.0
    slots = (("cpu", 2.5, 1.0, 0.1), ("old", 24.0 * 9, 24.0 * 8, 0.1), ("prepare-0", 2.0, 1.0, 0.0))
    with here.database.write() as session:
        for attempt, (slot, since, until, billing) in enumerate(slots, 1):
            ids = {"job_id": session_id, "attempt": attempt, "owner_id": member.user_id, "project_id": here.lab.id}
            session.execute(
                insert(Allocation).values(
                    **ids,
                    node=here.fresh("box"),
                    slot=slot,
                    billing=billing,
                    charged_at=db_now(),
                    created_at=db_now() - since * hour,
                    released_at=db_now() - until * hour,
                )
            )
    limit(session_hours_week=1.6)
    assert sender.send(session_id, "create").status_code == 202
    limit(session_hours_week=1.4)
    refused(
        sender.send(session_id, "zero_grad"), "quota of 1.4 hours a week", "(1.5 in seven days)", "`save` still works"
    )
    refused(sender.open(), "quota of 1.4 hours a week")
    assert sender.send(session_id, "save", name="x").status_code == 202
    limit(session_hours_week=None)
    assert sender.send(session_id, "zero_grad").status_code == 202


@pytest.mark.both_databases
@pytest.mark.parametrize("tokens", [2, log.IN_ROWS], ids=["in rows", "in files"])
def test_bytes(here: World, member: Caller, sender: Sender, limit: Callable[..., None], tokens: int) -> None:
    """Arrays count until two snapshots hold them, or the session has ended."""
    session_id, row = opened(sender), {"tokens": [1] * tokens, "lengths": [tokens]}
    assert sender.send(session_id, "forward", arrays=row).status_code == 202

    def kept() -> tuple[int, int]:
        files = sum(file.stat().st_size for file in (here.layout.session(session_id) / "log").glob("*"))
        of_rows = select(func.coalesce(func.sum(func.length(SessionOperation.tensors)), 0))
        with here.database.read() as session:
            in_rows = session.execute(of_rows.where(SessionOperation.session_id == session_id)).scalar_one()
        assert not (files if tokens == 2 else in_rows)
        shown = here.ask("GET", f"/sessions/{session_id}", member.key).json()
        return int(shown["log_bytes"]), files + in_rows

    size, on_disk = kept()
    assert size == on_disk > 0
    limit(session_bytes=2 * size)
    assert sender.send(session_id, "forward", arrays=row).status_code == 202
    assert kept() == (2 * size, 2 * size)
    refused(sender.send(session_id, "forward", arrays=row), "of sessions is used", "EFT_SESSION_RESULT_HOURS")
    assert kept() == (2 * size, 2 * size), "nothing of what was refused is left"
    assert sender.send(session_id, "zero_grad").status_code == 202, "it takes no room"
    token = Token(session_id, 0, "worker-x")
    for forgotten, left in ((0, 2), (1, 1), (1, 1)):
        with here.database.write() as session:
            log.snapshotted(session, token, 2, forgotten)
        log.remove_tensors(here.layout.session(session_id), forgotten)
        assert kept() == (left * size, left * size)
    assert sender.send(session_id, "forward", arrays=row).status_code == 202
    assert kept()[0] == 2 * size
    closed(here, member, session_id)
    while log.forget_ended(here.database, here.layout):
        pass
    assert kept() == (0, 0)
    other = opened(sender)
    assert sender.send(other, "forward", arrays=row).status_code == 202


def test_quotas_of_others_do_not_count(here: World, sender: Sender, limit: Callable[..., None]) -> None:
    rivals: Project = here.rivals
    with here.database.write() as session:
        quotas.change(session, here.lab.owner, "project", rivals.name, {**GONE, "max_sessions": 0, "session_bytes": 0})
    try:
        assert sender.send(opened(sender), "forward", arrays=ROW).status_code == 202
    finally:
        with here.database.write() as session:
            quotas.change(session, here.lab.owner, "project", rivals.name, GONE)


def test_a_model_of_tinkers_sdk_that_is_refused_leaves_no_session(
    here: World, member: Caller, limit: Callable[..., None]
) -> None:
    def ask(path: str, body: Any) -> Any:
        return here.ask("POST", f"/api/v1/{path}", member.key, json=body)

    limit(max_adapters=1)
    session = ask("create_session", {}).json()["session_id"]
    wishes = [{"session_id": session, "model_seq_id": number, "base_model": MODEL} for number in range(2)]
    first = ask("create_model", wishes[0])
    assert first.status_code == 200, first.text
    late = ask("create_model", wishes[1])
    assert late.status_code == 403 and "quota of 1 adapters" in late.json()["detail"], late.text
    assert ask("create_model", wishes[0]).json() == first.json(), "asked again it is the same"
    mine = here.ask("GET", "/sessions?mine=true", member.key).json()["data"]
    assert sorted(one["status"] for one in mine) == ["closed", "queued"]
