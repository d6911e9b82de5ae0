"""The cache below the data root stays below its bound, and nothing that is used is taken away."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import HOME, caches
from core.db.engine import Database
from core.settings import Settings
from worker.upkeep import disk_room
from worker.upkeep.housekeeping import Housekeeper


def entry(cache: Path, name: str, size: int, hours_ago: float) -> Path:
    """Of one file of `size` bytes, its manifest counted."""
    folder = cache / name
    folder.mkdir(parents=True)
    manifest = folder / ("manifest.json" if "packed" in name else "about.json")
    manifest.write_bytes(b"{}")
    (folder / "content").write_bytes(b"x" * (size - 2))
    then = time.time() - 3600 * hours_ago
    os.utime(manifest, (then, then))
    return folder


def names(gone: list[caches.CacheEntry]) -> list[str]:
    return [one.manifest.parent.name for one in gone]


def test_what_nobody_used_for_longest_goes_first(tmp_path: Path) -> None:
    old = entry(tmp_path, "packed/old", 400, 30)
    older = entry(tmp_path, "tokens/rows/older", 300, 40)
    other = entry(tmp_path, "tokens/rows/other", 100, 1)
    new = entry(tmp_path, "packed/new", 500, 2)
    entry(tmp_path, "packed/.new-unfinished", 10_000, 0.1)  # its maker is at it
    (tmp_path / "selftest").mkdir()
    (tmp_path / "selftest" / "verdict.json").write_text("{}")
    assert caches.make_room(tmp_path, 1300) == []
    assert names(caches.make_room(tmp_path, 1050)) == ["older"] and not older.exists() and old.exists()
    held = (old / "content").open("rb")
    assert names(caches.make_room(tmp_path, 100)) == ["old", "new"] and not new.exists() and other.exists()
    assert held.read() == b"x" * 398  # whoever reads goes on reading
    held.close()
    assert names(caches.make_room(tmp_path, 0)) == ["other"] and not other.parent.exists()
    assert (tmp_path / "selftest" / "verdict.json").exists() and (tmp_path / "packed" / ".new-unfinished").exists()
    assert caches.make_room(tmp_path / "nothing", 0) == []


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    left = [entry(tmp_path, name, 10, 1) for name in ("packed/.new-a", "tokens/.bad-b", "tokens/rows/.old-c")]
    os.utime(left[0], (0, 0))
    os.utime(left[2], (0, 0))
    caches.make_room(tmp_path, 1000)
    assert [folder.exists() for folder in left] == [False, True, False]


def test_what_is_held_stays_whoever_holds_it(tmp_path: Path) -> None:
    ours, theirs = entry(tmp_path, "packed/ours", 100, 50), entry(tmp_path, "tokens/rows/theirs", 100, 50)
    lease = caches.hold(ours / "manifest.json")
    code = "import sys; from pathlib import Path; from core import caches\n"
    code += "lease = caches.hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs / "about.json")],
        cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert lease is not None and other.stdout is not None and other.stdout.readline()
    assert caches.make_room(tmp_path, 0) == []
    other.kill()  # the lock is the kernel's
    other.communicate()
    assert names(caches.make_room(tmp_path, 0)) == ["theirs"]
    lease.close()
    assert names(caches.make_room(tmp_path, 0)) == ["ours"]
    assert caches.hold(ours / "manifest.json") is None


def test_holding_is_using(tmp_path: Path) -> None:
    first, second = entry(tmp_path, "packed/first", 100, 50), entry(tmp_path, "packed/second", 100, 40)
    lease = caches.hold(first / "manifest.json")
    assert lease is not None
    lease.close()
    assert names(caches.make_room(tmp_path, 100)) == ["second"] and not second.exists()


def _churn(cache: str, seed: int, barrier: object) -> None:
    """Makes, holds and throws away; whatever is held is whole until it is let go."""
    chance, root = random.Random(seed), Path(cache)
    barrier.wait(250)  # type: ignore[attr-defined]
    for turn in range(150):
        folder = root / "packed" / str(chance.randrange(6))
        if (lease := caches.hold(folder / "manifest.json")) is not None:
            for _ in range(2):
                assert (folder / "content").read_bytes() == b"x" * 98
                caches.make_room(root, chance.choice([0, 100, 300]))
            lease.close()
        else:
            aside = entry(root, f"packed/.new-{seed}-{turn}", 100, 0)
            try:
                aside.rename(folder)
            except OSError:
                continue  # the other one was faster


def test_processes_that_make_and_throw_away_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    both = [context.Process(target=_churn, args=(str(tmp_path), seed, barrier)) for seed in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]


def test_the_housekeeper_keeps_to_the_setting(tmp_path: Path) -> None:
    idle = entry(tmp_path, "cache/packed/idle", 200, 5)
    for bound, stays in ((0, True), (500, True), (100, False)):
        settings = Settings(data=tmp_path, cache_bytes=bound)
        keeper = Housekeeper(Database(f"sqlite:///{tmp_path / 'eft.db'}"), settings, "worker", print, lambda: 0)
        keeper._shrink_cache()
        assert idle.exists() == stays


def test_where_there_is_no_room_the_cache_goes_before_a_job_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = entry(tmp_path, "cache/packed/old", 100, 5), entry(tmp_path, "cache/packed/new", 100, 1)
    monkeypatch.setattr(disk_room.disk_room, "stale", lambda *_: False)
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda _: SimpleNamespace(free=950))
    found = disk_room.Room(Database(f"sqlite:///{tmp_path / 'eft.db'}"), tmp_path, 1000)
    found.tell()
    assert not old.exists() and new.exists()
