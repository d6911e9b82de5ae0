"""A worker joins an installation: its data root, its version, its clock and its broker are looked at, and what is wrong
is said in words that name the setting."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from box import adopt, broker
from core import __version__
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Installation, Node
from core.jobs import installation
from core.jobs.installation import MARK, OtherDataRoot
from core.jobs.policies import nodes
from core.settings import Settings
from core.spec import vocabulary
from core.storage.store import Folder
from tests.support import forks, selftest
from tests.support.killed import killed
from tests.support.service import wait_for
from worker.agent.agent import Agent
from worker.preflight import joining
from worker.preflight.node import NotNow, Refused


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Database]:
    """A database of its own, as a lab has it: not in the data root."""
    database = Database(f"sqlite:///{tmp_path / 'lab.db'}")
    migrate.upgrade(database)
    yield database
    database.dispose()


def settings(tmp_path: Path, data: str = "data", **changes: object) -> Settings:
    given = {"data": tmp_path / data, "database_url": f"sqlite:///{tmp_path / 'lab.db'}", "node": "box", "spare": False}
    given |= {"sweep_seconds": 0.5}
    return Settings(**given | changes)  # type: ignore[arg-type]


def serve(tmp_path: Path, data: str = "data", **changes: object) -> Agent:
    """A worker that has joined."""
    mine = settings(tmp_path, data, **changes)
    selftest.lay(mine.root, mine.node)
    return Agent(mine)


def test_the_first_marks_the_data_root_and_others_have_to_see_that_mark(home: Database, tmp_path: Path) -> None:
    serve(tmp_path).stop()
    mark = json.loads((tmp_path / "data" / MARK).read_text())
    with home.read() as session:
        row = installation.find(session)
    assert (mark["installation"], mark["token"], mark["by"]) == (row.id, row.mark, "the worker on box")

    # The same folder under another path, as another box has it.
    (tmp_path / "elsewhere").symlink_to(tmp_path / "data")
    serve(tmp_path, "elsewhere", node="other").stop()

    # A folder that is empty: the disk is not mounted.
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=f"not that of this installation: it has no {MARK}.*Is it mounted.*EFT_DATA"):
        Agent(settings(tmp_path, "empty"))
    assert list((tmp_path / "empty").iterdir()) == [], "nothing is made in a folder that is not ours"

    # A copy from before the mark was made anew.
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy" / MARK).write_text(json.dumps(mark | {"token": "0" * 32}))
    with pytest.raises(Refused, match=r"is a copy or another one.*`eft adopt`"):
        Agent(settings(tmp_path, "copy"))

    # That of somebody else.
    (tmp_path / "copy" / MARK).write_text(json.dumps(mark | {"installation": "inst-other", "by": "the API on far"}))
    with pytest.raises(Refused, match=f"another installation .inst-other, marked by the API on far.*that of {row.id}"):
        Agent(settings(tmp_path, "copy"))


def test_adopt_is_the_way_out(
    home: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path).stop()
    new = settings(tmp_path, "new")
    new.root.mkdir()
    monkeypatch.setattr(sys, "argv", ["eft adopt"])
    monkeypatch.setattr(adopt, "settings", lambda: new)
    assert adopt.main() == 0
    assert str(tmp_path / "new") in capsys.readouterr().out
    serve(tmp_path, "new").stop()
    with pytest.raises(Refused, match="copy or another one"):
        Agent(settings(tmp_path))


def test_adopt_that_is_killed_midway_is_done_by_the_same_command(home: Database, tmp_path: Path) -> None:
    """Before the database knows of it the old place goes on, then the new one; what refuses says what to do."""
    old, new = Folder(tmp_path / "old"), Folder(tmp_path / "new")
    for store in (old, new):
        store.root.mkdir()
    installation.check_data_root(home, old, "the API")
    places = ["core.jobs.installation:write_mark", "core.jobs.installation:open_to"]
    variables = {"EFT_DATA": str(new.root), "EFT_DATABASE_URL": f"sqlite:///{tmp_path / 'lab.db'}"}
    with killed("box.adopt", places, [], variables) as tries:
        assert next(tries) == (-signal.SIGKILL, "")
        installation.check_data_root(home, old, "the API")
        with pytest.raises(OtherDataRoot, match="`eft adopt`"):
            installation.check_data_root(home, new, "the API")
        assert next(tries) == (-signal.SIGKILL, "")
        for _ in range(2):
            installation.check_data_root(home, new, "the API")
            with pytest.raises(OtherDataRoot, match="`eft adopt`"):
                installation.check_data_root(home, old, "the API")
            code, told = next(tries, (0, str(new.root)))
            assert code == 0 and str(new.root) in told


def test_of_two_that_come_first_at_once_one_is_right(home: Database, tmp_path: Path) -> None:
    found: list[object] = []

    def come(number: int) -> None:
        store = Folder(tmp_path / f"root-{number % 2}")
        store.root.mkdir(exist_ok=True)
        try:
            installation.check_data_root(home, store, f"number {number}")
            found.append(number % 2)
        except OtherDataRoot as error:
            found.append(error)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for one in found if isinstance(one, int)}) == 1, found
    assert sum(isinstance(one, OtherDataRoot) for one in found) == 3, found


def test_the_api_refuses_another_data_root_and_says_so(home: Database, tmp_path: Path) -> None:
    serve(tmp_path).stop()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment |= {"EFT_DATABASE_URL": f"sqlite:///{tmp_path / 'lab.db'}", "EFT_DATA": str(tmp_path / "wrong")}
    with (tmp_path / "api.log").open("wb") as log:
        code = forks.start("api", environment=environment, log=log.fileno()).wait(120)
    said = (tmp_path / "api.log").read_text()
    assert code == 78, said
    assert f"it has no {MARK}" in said and "Traceback" not in said


def test_versions_that_fit_and_one_that_does_not(home: Database, tmp_path: Path) -> None:
    installation.announce(home, __version__)
    assert installation.standing(home, __version__) == installation.VersionFit(True, "")
    assert "read the same jobs" in installation.standing(home, "0.0.9").words

    def api_says(words: set[str]) -> None:
        with home.write() as session:
            digest = vocabulary.digest(frozenset(words))
            session.execute(update(Installation).values(version="9.0", words=sorted(words), words_sha256=digest))

    # A worker that was upgraded before the API knows all of its words.
    api_says(set(vocabulary.words()) - {"LoRA.r"})
    agent = serve(tmp_path)
    agent.start(lambda _: None, lambda: 0)
    with home.read() as session:
        (notes,) = session.execute(select(Node.notes)).scalars()
    assert any("is newer than the API (9.0)" in note for note in notes)

    # The API is upgraded past it while it serves: what it cannot read it does not claim, and its node says why.
    api_says(set(vocabulary.words()) | {"SingleDevice.wings"})
    agent.serve()

    def told() -> bool:
        with home.read() as session:
            (notes,) = session.execute(select(Node.notes)).scalars()
        return any("this worker claims nothing" in note and "`SingleDevice.wings`" in note for note in notes)

    wait_for(told, 60, "the note")
    agent.stop()
    with pytest.raises(Refused, match=r"older than the API .9\.0.*SingleDevice\.wings.*the API comes last"):
        Agent(settings(tmp_path))


def test_the_words_of_a_job() -> None:
    words = vocabulary.words()
    assert {"JobSpec.model", "SingleDevice.accelerator=cpu", "LoRA.r", "HubModel.revision"} <= words
    assert vocabulary.digest() == vocabulary.digest(frozenset(words)) != vocabulary.digest(words | {"x"})


def test_a_clock_that_is_wrong_is_told(home: Database, tmp_path: Path) -> None:
    assert joining._clock(home) == ""
    for ahead, words in ((-75.0, "75 s ahead of"), (300.0, "300 s behind")):
        other = Database(f"sqlite:///{tmp_path / 'lab.db'}", clock=lambda ahead=ahead: time.time() + ahead)
        assert words in joining._clock(other)
        other.dispose()


def test_three_settings_and_a_broker_of_ones_own(home: Database, tmp_path: Path) -> None:
    mine = settings(tmp_path)
    with pytest.raises(Refused, match="three settings: EFT_DATABASE_URL, EFT_BROKER_URL and EFT_DATA"):
        joining.check_broker_is_named(mine)
    socket = mine.broker_socket
    broker.prepare(mine.root / "broker", socket)
    with (tmp_path / "broker.log").open("wb") as log:
        server = subprocess.Popen(broker.command(mine.root / "broker", socket), stdout=log, stderr=log)
    try:
        wait_for(lambda: broker.answers(socket), 30, "the broker")
        joining.check_broker_is_named(mine)
        named = settings(tmp_path, broker_url=f"redis+socket://{socket}")
        joining.check_broker(home, named)
        joining.check_broker(home, named)
        other = Database(f"sqlite:///{tmp_path / 'other.db'}")
        migrate.upgrade(other)
        with pytest.raises(Refused, match=r"belongs to another installation .inst-.*redis://host:6379/1"):
            joining.check_broker(other, named)
        other.dispose()
    finally:
        server.terminate()
        server.wait(10)


def test_with_a_bucket_a_name_belongs_to_the_box_that_had_it_last(home: Database, tmp_path: Path) -> None:
    here, there = (settings(tmp_path, f"work-{number}", lease_seconds=90) for number in range(2))
    joining.check_name(home, here)
    with home.write() as session:
        nodes.register(session, "box", "wrk-1", __version__, [], [])
    joining.remember_worker(here, "wrk-1")
    joining.check_name(home, here)
    with pytest.raises(NotNow, match=r"another box serves node `box`.*EFT_NODE.*wait 90 s"):
        joining.check_name(home, there)
    with home.write() as session:
        session.execute(update(Node).values(heartbeat_at=Node.heartbeat_at - 100))
    joining.check_name(home, there)
