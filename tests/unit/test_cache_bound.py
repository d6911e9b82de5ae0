"""The cache below the data root stays below its bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

from core.db.engine import Database
from core.settings import Settings
from core.storage.cache import shrink
from worker.housekeeping import Housekeeper


def entry(cache: Path, name: str, size: int, hours_ago: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(b"x" * size)
    then = time.time() - 3600 * hours_ago
    os.utime(folder, (then, then))
    return folder


def test_what_nobody_used_for_longest_goes_first(tmp_path: Path) -> None:
    old = entry(tmp_path, "packed/old", 400, 30)
    older = entry(tmp_path, "tokens/older", 300, 40)
    new = entry(tmp_path, "packed/new", 500, 2)
    entry(tmp_path, "packed/.new-unfinished", 10_000, 50)  # its maker's business
    (tmp_path / "tokens" / "note.json").write_text("{}")
    assert shrink(tmp_path, 1200) == []
    assert shrink(tmp_path, 950) == ["tokens/older"] and not older.exists() and old.exists()
    held = (old / "content").open("rb")
    assert shrink(tmp_path, 100) == ["packed/old", "packed/new"] and not new.exists()
    assert held.read() == b"x" * 400  # whoever reads goes on reading
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        ".new-unfinished", "content", "note.json", "packed", "tokens",
    ]  # fmt: skip
    assert shrink(tmp_path / "nothing", 0) == []


def test_what_was_just_used_stays_and_is_counted(tmp_path: Path) -> None:
    busy = entry(tmp_path, "packed/busy", 900, 0.5)
    idle = entry(tmp_path, "packed/idle", 200, 5)
    assert shrink(tmp_path, 1000) == ["packed/idle"] and busy.exists() and not idle.exists()
    assert shrink(tmp_path, 10) == [] and busy.exists()


def test_the_housekeeper_keeps_to_the_setting(tmp_path: Path) -> None:
    idle = entry(tmp_path, "cache/packed/idle", 200, 5)
    for bound, stays in ((0, True), (500, True), (100, False)):
        settings = Settings(data=tmp_path, cache_bytes=bound)
        keeper = Housekeeper(Database(f"sqlite:///{tmp_path / 'eft.db'}"), settings, "worker", print, lambda: 0)
        keeper._shrink_cache()
        assert idle.exists() == stays
