"""The data root is its user's alone, however it was made."""

from __future__ import annotations

import ast
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core import HOME, private
from core.storage.layout import Layout

NOBODY = 65534
NO_DATA = {
    *("api/docs/policy_table.py", "api/docs/routes_page.py", "core/docs/__main__.py"),  # pages of docs/
    *("core/hardware/choose_torch.py", "box/healthy.py", "box/doctor/__main__.py"),  # they write nothing there
    "box/systemd/service.py",  # writes units, with their modes
}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_data_root_that_was_there_is_closed_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "data"
    root.mkdir()
    root.chmod(0o2775)
    for name in ("eft.db", "eft.db-wal"):
        (root / name).write_bytes(b"")
        (root / name).chmod(0o644)
    (root / "old").mkdir()
    (root / "old").chmod(0o755)
    (root / "elsewhere").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING):
        Layout(root).create()
    assert mode(root) & 0o777 == 0o700
    assert [mode(root / name) for name in ("eft.db", "eft.db-wal", "old")] == [0o600, 0o600, 0o700]
    assert "was open to other users of this box" in caplog.text
    caplog.clear()
    Layout(root).create()
    assert caplog.text == ""


def test_one_that_cannot_be_closed_is_refused_with_the_way_out() -> None:
    """By somebody who may not change it: where the tests run as root, who may, a child that is nobody."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) if os.geteuid() == 0 else Path("/usr")
        if os.geteuid() == 0:
            root.chmod(0o755)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setuid(NOBODY)
                try:
                    private.close(root)
                except private.OpenDataRoot as error:
                    status = 0 if f"EFT_DATA={root}/eft" in error.message and "chmod 700" in error.message else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mode(root) & 0o055


def test_migrating_makes_and_leaves_it_private(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    root.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment["EFT_DATA"] = str(root)
    subprocess.run(
        [sys.executable, "-m", "core.db.migrate"], cwd=HOME, env=environment, check=True, umask=0o022, timeout=300
    )
    assert mode(root) == 0o700
    assert {mode(path) for path in root.iterdir()} == {0o600}


def test_every_command_of_the_service_begins_with_it() -> None:
    """Whatever is started as `python -m …` and may write below the data root. Children of the trainer inherit it."""
    mains = []
    for folder in ("api", "worker", "box", "core/db"):
        for path in sorted((HOME / folder).rglob("*.py")):
            source = path.read_text()
            name = str(path.relative_to(HOME))
            if '__name__ == "__main__"' in source and name not in NO_DATA:
                mains.append(name)
                calls = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
                assert "private.umask()" in calls, f"{name}: begin with `private.umask()` (core/private.py)"
    assert {"api/__main__.py", "worker/__main__.py", "box/up.py", "core/db/migrate.py"} <= set(mains)
