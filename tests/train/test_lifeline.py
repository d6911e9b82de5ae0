"""The child's two small shared modules, in real processes: events.jsonl and the tie to the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.base.clock import boottime
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FENCED
from core.spec.run.heartbeat import heartbeat
from core.train.base.events import EventWriter

CHILD = """
import sys, time
from core.train.entry.fencing import arm
stop = arm(float(sys.argv[1]) if sys.argv[1] != "none" else None)
print("armed", flush=True)
while not stop.requested:
    time.sleep(0.02)
sys.exit(75)
"""


def start(fence: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, fence], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"armed\n"
    return child


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_events_go_on_over_an_existing_file_and_cut_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    assert writer.write("phase", phase="loading") == 1
    writer.write("notice", code="long", message="ü" * 100_000)
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"seq": 3, "half')
    writer = EventWriter(path)
    assert writer.write("metrics", step=1, values={"loss": float("nan"), "learning_rate": 1e-4}) == 3
    events = lines(path)
    assert [event["seq"] for event in events] == [1, 2, 3]
    assert events[2]["values"] == {"loss": None, "learning_rate": 1e-4}
    assert abs(float(str(events[2]["time"])) - time.time()) < 60


def test_events_from_threads_are_whole_and_in_order(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")

    def work() -> None:
        for step in range(200):
            writer.write("metrics", step=step, values={"loss": 1.0})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event["seq"] for event in lines(writer.path)] == list(range(1, 801))


def test_end_of_file_fences() -> None:
    child = start("900")
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(250) == EXIT_FENCED


def test_silence_fences_and_heartbeats_do_not() -> None:
    """Heartbeats over more than the fence's time keep it; where this machine did not let us beat in time, again."""
    for fence in (1.0, 2.0, 4.0, 8.0):
        child = start(str(fence))
        assert child.stdin is not None
        began = last = time.monotonic()
        longest = 0.0
        while last - began < 1.5 * fence and longest < fence / 2:
            time.sleep(0.05)
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(heartbeat(boottime()))
                child.stdin.flush()
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        alive = child.poll() is None
        assert child.wait(250) == EXIT_FENCED
        if alive and longest < fence / 2:
            return
    pytest.fail(f"fenced in spite of heartbeats, the last time of {fence:g} s at most {longest:.2f} s apart")


def test_heartbeats_that_waited_in_the_pipe_are_as_old_as_they_are() -> None:
    """A child that was stopped reads them when it goes on; somebody else may have the job by then."""
    child = start("1.0")
    assert child.stdin is not None and child.stderr is not None
    child.send_signal(signal.SIGSTOP)
    while child.poll() is None and not all(state == "T" for state in thread_states(child.pid)):
        time.sleep(0.005)
    held_at = boottime()
    with contextlib.suppress(BrokenPipeError):  # this machine was busy for a second: it has ended by itself
        child.stdin.write(heartbeat(held_at) + heartbeat(held_at)[:3])
        child.stdin.flush()
    ended = child.poll() is not None
    while boottime() < held_at + 3.1:
        time.sleep(0.05)
    child.send_signal(signal.SIGCONT)
    assert child.wait(250) == EXIT_FENCED
    said = child.stderr.read()
    assert int(said.split(b"no heartbeat for ")[1].split()[0]) >= (1 if ended else 3), said


STARVED = """
import ctypes, sys, time
from core.train.entry.fencing import arm
arm(1.0)
print("armed", flush=True)
for _ in range(4):  # as libraries that are being loaded: no other thread of Python has a turn, but for moments between
    ctypes.PyDLL(None).usleep(1_500_000)
time.sleep(0.3)
print("alive", flush=True)
"""


def test_a_fence_that_stood_still_reads_before_it_judges() -> None:
    child = subprocess.Popen([sys.executable, "-c", STARVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == b"armed\n"
    while child.poll() is None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(heartbeat(boottime()))
            child.stdin.flush()
        time.sleep(0.02)
    assert child.stdout.read() == b"alive\n"


def thread_states(pid: int) -> list[str]:
    """None when it has just ended."""
    with contextlib.suppress(OSError):
        return [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return []


def test_what_is_no_heartbeat_ends_it() -> None:
    child = start("900")
    assert child.stdin is not None and child.stderr is not None
    child.stdin.write(b"tomorrow\n")
    child.stdin.flush()
    assert child.wait(250) == EXIT_FENCED
    assert b"not a heartbeat: b'tomorrow'" in child.stderr.read()


def test_silence_counts_from_when_the_lease_was_last_held() -> None:
    """A worker that slept between its claim and the child's start: nobody owns the attempt any more."""
    code = "import sys; from core.train.entry.fencing import arm; arm(900, held_at=float(sys.argv[1])); print('armed')"
    now = boottime()
    for held_at, waiting, expected in (
        (now - 901, b"", EXIT_FENCED), (now - 300, b"", 0), (now - 901, heartbeat(now), 0),
        (now - 901, b".", 0),  # of a worker that was started before heartbeats told the time
    ):  # fmt: skip
        command = [sys.executable, "-c", code, str(held_at)]
        stdin, held_open = os.pipe()  # not closed by us while the child runs: that too would fence it
        try:
            os.write(held_open, waiting)  # the last one: it took its time to start, and the lease is held
            done = subprocess.run(command, stdin=stdin, capture_output=True, check=False)
        finally:
            os.close(stdin)
            os.close(held_open)
        assert done.returncode == expected, done.stderr
        assert (b"since before it was started" in done.stderr) == (expected == EXIT_FENCED)


def test_it_leaves_at_once_with_all_told() -> None:
    """Whatever libraries want to do at the end: the fence would not hold meanwhile."""
    code = "import atexit, time; from core.train.entry import fencing; atexit.register(time.sleep, 900); print(1); "
    code += "fencing.leave(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=250)
    assert (done.returncode, done.stdout) == (3, b"1\n")


@pytest.mark.parametrize("fence", ["none", "900"])
def test_sigterm_asks_to_stop(fence: str) -> None:
    child = start(fence)
    assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) >= 500
    child.terminate()
    assert child.wait(250) == 75


BUSY = """
import time
from core.train.entry.fencing import arm
stop = arm(None)
with stop.at_once():
    pass
try:
    with stop.at_once():
        print("armed", flush=True)
        time.sleep(600)  # a library that loads a model looks at nothing of ours
finally:
    print("not at once", flush=True)
"""


def test_while_there_is_nothing_to_keep_sigterm_ends_it_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"armed\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == EXIT_CHECKPOINTED
    assert child.stdout.read() == b""


def test_by_hand_stdin_and_parent_do_not_matter() -> None:
    child = start("none")
    assert child.stdin is not None
    child.stdin.close()
    time.sleep(0.3)
    assert child.poll() is None
    child.terminate()
    assert child.wait(250) == 75


def test_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Stdin stays open here (the test holds it), so only the death of the parent can end the grandchild."""
    read, write = os.pipe()
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}, '900'], stdin={read}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(900)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, pass_fds=[read])
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 250
    while _alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(read)
    os.close(write)
    assert not _alive(grandchild)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_sigint_is_reset() -> None:
    command = [sys.executable, "-c", CHILD, "none"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None,
    )
    assert child.stdout is not None and child.stdout.readline() == b"armed\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(250) != 0
