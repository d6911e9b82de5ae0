"""The commands of an operator (docs/operations.md) as they are typed, and what a full budget says everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import box.backup.__main__ as backup
from api.auth.policy import Role, Scope
from box import db, restore
from box.doctor.disk import look
from box.doctor.report import Report
from core.jobs.lifecycle.submit import submit
from core.storage.layout import RESTORING
from tests.support.world import World, world
from worker.upkeep import disk_usage

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    budgets = {"disk_budget_uploads_bytes": 1000, "disk_budget_runs_bytes": 1}
    with world(tmp_path_factory.mktemp("operations") / "data", **budgets) as made:
        yield made


@pytest.fixture
def run(here: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit status, stdout, stderr) of one of the box's commands on that installation."""
    monkeypatch.setenv("EFT_DATA", str(here.layout.root))

    def ran(main: Callable[[], int], *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eft", *map(str, arguments)])
        status = main()
        said = capsys.readouterr()
        return status, said.out, said.err

    return ran


def test_the_commands_of_backup_and_restore(run: Run, here: World, tmp_path: Path) -> None:
    dest = tmp_path / "backups"
    assert run(backup.main, "list", dest)[0] == 1
    status, said, _ = run(backup.main, "create", dest, "--json")
    first = json.loads(said)
    assert status == 3 and len(first["missing"]) > 0, "this world's files are rows alone"
    assert run(backup.main, "create", dest, "--no-models")[0] == 3
    status, said, _ = run(backup.main, "list", dest)
    assert status == 0 and len(said.splitlines()) == 2 and said.startswith(first["name"])
    assert "without models" in said.splitlines()[1]
    assert run(backup.main, "verify", dest)[:2][0] == 0
    status, said, _ = run(backup.main, "prune", dest, "--keep", 1)
    assert status == 0 and "removed 1 backup(s)" in said
    status, _, words = run(backup.main, "create", here.layout.root / "backups")
    assert status == 1 and "inside the data root" in words

    status, said, _ = run(restore.main, dest, "--data", tmp_path / "new")
    assert status == 0 and "revoke again what was revoked since" in said and "was missing" in said
    assert (tmp_path / "new" / "eft.db").is_file() and not (tmp_path / "new" / RESTORING).exists()
    status, _, words = run(restore.main, dest, "--data", tmp_path / "new")
    assert status == 1 and "is not empty" in words


def test_a_backup_of_nothing_says_so_and_makes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFT_DATA", str(tmp_path / "nowhere"))
    for there in (False, True):
        status, _, words = run(backup.main, "create", tmp_path / "backups")
        assert (
            status == 1 and f"there is no installation at {tmp_path / 'nowhere'}; EFT_DATA names where it is" in words
        )
        assert list((tmp_path / "nowhere").glob("*")) == [] and (tmp_path / "nowhere").is_dir() is there
        (tmp_path / "nowhere").mkdir(exist_ok=True)


def test_the_command_of_the_schema(run: Run, here: World) -> None:
    status, said, _ = run(db.main, "status")
    assert status == 0 and "up to date" in said and "0 job(s) held" in said
    told = json.loads(run(db.main, "status", "--json")[1])
    assert told["fit"] and told["missing"] == [] and told["nodes"] == [{"name": "box", "version": "0.1.0"}]


def test_a_budget_that_is_used_up_is_told_everywhere(here: World) -> None:
    disk_usage.measure(here.database, here.layout)
    words = "of a budget of 0.0 MB (EFT_DISK_BUDGET_RUNS_BYTES)"
    (check,) = [here.ask("GET", "/readyz").json()["checks"]["data"]]
    assert check["ok"] and words in check["detail"]
    report = Report()
    look(report, here.settings)
    assert [one.level for one in report.findings] == ["ok", "problem"] and words in report.findings[1].detail
    with here.database.write() as session:
        job_id = submit(session, here.lab.owner, here.spec(here.lab.file)).id
    boss = here.caller("boss", Role.ADMIN, Scope.ADMIN)
    assert words in here.ask("GET", f"/jobs/{job_id}", boss.key).text
    kept = here.ask("POST", "/files", boss.key, files={"file": ("rows.jsonl", b'{"text": "a"}\n')})
    assert kept.status_code == 201, "the budget of uploads has room"
    refused = here.ask("POST", "/files", boss.key, files={"file": ("rows.jsonl", b'{"text": "a"}\n' * 100)})
    assert refused.status_code == 507 and "EFT_DISK_BUDGET_UPLOADS_BYTES" in refused.text
