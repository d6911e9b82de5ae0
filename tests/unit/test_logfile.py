"""Logs do not grow without bound, and who follows one misses no line that is kept and sees none twice."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from api.errors import Gone
from api.jobs.output import logs
from core import HOME, logfile

KIB = 1 << 10


def follow(path: Path, over: threading.Event) -> list[str]:
    """As `eft logs -f` does: from where the last window ended."""
    offset, text = 0, ""
    while True:
        last = over.is_set()
        while (window := logs.read(path, offset=offset)).offset != offset:
            text, offset = text + window.text, window.offset
        if last:
            return text.splitlines()
        time.sleep(0.001)


def test_a_runs_log_is_bounded_and_followed_line_by_line(tmp_path: Path) -> None:
    path, over, most = tmp_path / "log.txt", threading.Event(), 512 * KIB
    writer = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    seen: list[list[str]] = []
    follower = threading.Thread(target=lambda: seen.append(follow(path, over)))
    follower.start()
    gone = 0
    for number in range(40_000):  # 80 characters each
        os.write(writer, f"{number:079d}\n".encode())
        if number % 100 == 0:
            gone += logfile.bound(path, most)
            assert path.stat().st_blocks * 512 <= most + 100 * 80 + 4096
    gone += logfile.bound(path, most)
    over.set()
    follower.join(250)
    os.close(writer)
    assert gone > 40_000 * 80 - most
    assert path.stat().st_size == 40_000 * 80, "no byte has another place than before"
    (lines,) = seen
    told = [line for line in lines if line.startswith("[") and line.endswith("are no longer kept]")]
    numbers = [int(line) for line in lines if line not in told and len(line) == 79]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 39_999, "in order, each once, up to the last"
    if not told:
        assert numbers == list(range(40_000))


def test_who_comes_late_is_told_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{number:079d}\n" for number in range(10_000)))
    gone = logfile.bound(path, 256 * KIB)
    assert gone > 0 and logfile.bound(path, 256 * KIB) == 0
    window = logs.read(path, offset=0)
    first, second, *_ = window.text.splitlines()
    assert first == f"[{gone} bytes of this log are no longer kept]"
    assert window.offset == window.size == 800_000
    assert logs.read(path, tail=2).text.splitlines() == [f"{number:079d}" for number in (9_998, 9_999)]
    assert "\0" not in logs.read(path).text and second.lstrip("0")


def test_a_line_longer_than_a_reply_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("begins\n" + "x" * 20_000_000 + "\nlast line\n")
    size = path.stat().st_size
    told = f"[{size - len('last line') - 1} bytes before this are left out]"
    assert logs.read(path, tail=400).text.splitlines() == [told, "last line"]
    assert logs.read(path, tail=1).text == "last line\n"


def test_a_file_system_without_holes_keeps_the_newest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{number:079d}\n" for number in range(10_000)))

    class NoHoles:
        """What NFS 4.1 answers."""

        def fallocate(self, *_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(logfile, "_libc", NoHoles())
    logfile.bound(path, 256 * KIB)
    assert path.stat().st_size < 256 * KIB
    text = logs.read(path, offset=500_000).text
    assert "are no longer kept]" in text and text.splitlines()[-1] == f"{9_999:079d}"


WRITER = """
import itertools, os, sys, time
from pathlib import Path
from core import logfile
logfile.LOOK_SECONDS = 0.01
logfile.keep(Path(sys.argv[1]), 1 << 16, 2000)
for number in itertools.count():
    os.write(1 + number % 2, b"%079d\\n" % number)
    if number > 300_000:  # so that the first of those files is still there, however late the test looks
        time.sleep(0.001)
"""


def test_a_services_log_loses_no_line_at_rotation_nor_at_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "api.log"
    path.parent.mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=HOME)
    try:
        deadline = time.monotonic() + 150
        while not path.with_name("api.log.5").exists():
            assert writer.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    files = sorted(path.parent.iterdir(), key=lambda one: -int(one.suffix[1:]) if one.suffix != ".log" else 1)
    numbers = [int(line) for one in files for line in one.read_text().splitlines()]
    assert sorted(numbers) == list(range(len(numbers)))
    for stream in range(2):  # one descriptor gets the new file before the other, and lines of both come in between
        mine = [number for number in numbers if number % 2 == stream]
        assert mine == sorted(mine)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    for number in range(5):
        path.write_text(str(number))
        logfile.rotate(path, 2)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"worker.log.1": "4", "worker.log.2": "3"}
    path.write_text("5")
    logfile.rotate(path, 0)
    assert not path.exists()


WITHOUT_DESCRIPTORS = """
import os, resource, sys, time
from pathlib import Path
from core import logfile

folder, most = Path(sys.argv[1]), 1 << 16
logfile.LOOK_SECONDS = 0.01
logfile.keep(folder / "api.log", most, 2)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for number in range(300):
    os.write(1, b"x" * 4095 + b"\\n")
    time.sleep(0.002)
time.sleep(0.3)
names = [folder / f"api.log{end}" for end in ("", ".0", ".1", ".2")]
full = sum(one.stat().st_size for one in names if one.exists())
for one in held:
    os.close(one)
for number in range(300):
    os.write(1, b"y" * 4095 + b"\\n")
    time.sleep(0.002)
time.sleep(0.3)
print(full, file=open(folder.parent / "full", "w"))
"""


def test_a_process_without_descriptors_keeps_its_log_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS, str(folder)], cwd=HOME, check=True)
    assert int((tmp_path / "full").read_text()) < 20 * (1 << 16), "1.2 MB were written"
    names = {one.name for one in folder.iterdir()}
    assert "api.log" in names and names <= {"api.log", "api.log.0", "api.log.1", "api.log.2"}
    assert sum(one.stat().st_size for one in folder.iterdir()) < 20 * (1 << 16)
    text = "".join(one.read_text() for one in folder.iterdir())
    assert "cannot be rotated" in text or "y" * 4095 in text


def test_a_pipe_in_place_of_a_runs_log_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    os.mkfifo(path)
    found: list[str] = []

    def read() -> None:
        try:
            logs.read(path)
        except Gone as error:
            found.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert found and "not a file" in found[0]
