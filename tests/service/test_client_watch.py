"""`eft watch` and `eft logs -f` against a real API: on a real terminal, in a pipe, and while the server is killed."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from eft.types import Job
from eft.watch.frame import BARS, Frame, sparkline
from eft.watch.plot import plot
from eft.watch.world import Line, Watched, World
from rich.console import Console

from core.jobs.lifecycle.finish import Failed, Requeued, Succeeded
from core.spec.run.folder import LOG_FILE
from tests.support import forks
from tests.support.client import EFT, environment
from tests.support.eft_forks import program
from tests.support.service import wait_for
from tests.support.terminal import Terminal


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        one.close()


def steps(count: int, total: int = 66) -> list[dict[str, Any]]:
    """What a trainer tells of its first steps: a loss that falls."""
    values = [{"type": "metrics", "step": n, "values": {"loss": 3.0 - n / 20}} for n in range(1, count + 1)]
    return [*values, {"type": "progress", "step": count, "total_steps": total, "epoch": 0.5, "seconds_left": 61}]


def start_again(api: Any) -> None:
    """The same API on the same port, which the fixture will stop."""
    settings = {"EFT_DATA": str(api.root), "EFT_DATABASE_URL": api.database_url, "EFT_PORT": api.url.rpartition(":")[2]}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    with api.log_file.open("ab") as log:
        api.process = forks.start("api", environment=clean | settings, log=log.fileno())


def write_log(api: Any, job_id: str, attempt: int, data: bytes) -> None:
    path = api.layout.attempt(job_id, attempt) / LOG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


# --- a restart of the server -------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back(start_api: Any, tmp_path: Path, terminals: list[Terminal]) -> None:
    """The screen says so and goes on; of a followed log nothing is lost or doubled, over two attempts."""
    with start_api() as api:
        job_id, token = api.start_job(name="voice intents")
        api.submit(name="in line")
        api.tell(token, *steps(33))
        write_log(api, job_id, token.attempt, "first line\nhalf of ü: ".encode() + "ü".encode()[:1])

        screen = Terminal(
            [program(), "watch"], environment(api, COLUMNS="200", LINES="90")
        )  # stale: it asks the terminal
        terminals.append(screen)
        followed, notes = tmp_path / "followed", tmp_path / "notes"
        with followed.open("wb") as out, notes.open("wb") as err:
            follower = subprocess.Popen([program(), "logs", "-f", job_id], env=environment(api), stdout=out, stderr=err)
        frame = screen.see("in line")
        assert any("voice intents running" in line and "50%" in line for line in frame)
        assert len(frame) == 24 and all(len(line) <= 80 for line in frame)
        wait_for(lambda: followed.read_text().startswith("first line\n"), 60, "the log", notes.read_text)

        api.process.kill()
        api.process.wait()
        screen.see("server away")
        write_log(api, job_id, token.attempt, "ü".encode()[1:] + b" and its end\nwritten meanwhile\n")
        mark = len(screen.raw)
        start_again(api)
        screen.see("the server is back", since=mark)
        assert "server away" not in screen.see("q quit", since=len(screen.raw))[0]

        mark = len(screen.raw)
        screen.resize(50, 12)
        narrow = wait_for(
            lambda: [f for f in screen.frames(mark) if len(f) == 12 and all(len(line) <= 50 for line in f)],
            120, "frames of the new size", screen.shown,
        )[-1]  # fmt: skip
        assert "voice intents" in "\n".join(narrow)

        write_log(api, job_id, token.attempt, b"last words of the first\n")
        api.end(token, Requeued("its box is needed"))
        second = api.go_on(job_id)
        write_log(api, job_id, second.attempt, b"the second attempt\nno line end")
        screen.see("running: runs on box", since=mark)
        api.end(second, Succeeded({"steps": 66}))
        assert follower.wait(120) == 0, notes.read_text()
        first = "first line\nhalf of ü: ü and its end\nwritten meanwhile\nlast words of the first\n"
        assert followed.read_text() == f"{first}the second attempt\nno line end"
        assert notes.read_text().count("trying again") == 1 and f"--- attempt {second.attempt}" in notes.read_text()

        screen.press("q")
        assert screen.end() == 0


# --- on a terminal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_color", [False, True])
def test_one_job_to_its_end(api: Any, terminals: list[Terminal], no_color: bool) -> None:
    job_id, token = api.start_job(name="one job")
    api.tell(token, *steps(33), {"type": "evaluation", "step": 33, "values": {"eval_loss": 0.83}})
    api.tell(token, {"type": "notice", "code": "n", "message": "clear \x1b[2J this"})
    more = {"NO_COLOR": "1"} if no_color else {}
    screen = Terminal([program(), "watch", job_id], environment(api, **more))
    terminals.append(screen)
    shown = "\n".join(screen.see("eval_loss 0.83 at step 33"))
    assert "33/66  1m 01s left" in shown and "loss 1.350 █" in shown and "\x1b[2J" not in screen.raw
    api.end(token, Failed("user", "bad_rows", "row 3 is bad", "data.train"))
    assert screen.end() == 1
    after = screen.raw[screen.raw.rfind("\x1b[?1049l") :]
    assert "row 3 is bad" in after, "the last word stays on the terminal"
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", screen.raw)) is not no_color


def test_keys_select_open_pause_and_cancel(api: Any, terminals: list[Terminal]) -> None:
    empty = Terminal([program(), "webhooks", "list"], environment(api))
    terminals.append(empty)
    wait_for(lambda: "no webhooks" in empty.text and "EVENTS" not in empty.text, 120, "words in place of a lone header")

    _, token = api.start_job(name="gone")
    api.tell(token, *steps(2))
    api.end(token, Succeeded({"train_loss": 1.25, "eval_before": {"eval_loss": 4.0}, "eval_after": {"eval_loss": 2.0}}))
    at_work, token = api.start_job(name="at work")
    api.tell(token, *steps(33))
    waiting = api.submit(name="waits")["id"]
    screen = Terminal([program(), "watch"], environment(api), columns=200, lines=50)
    terminals.append(screen)
    screen.see("Loss of at work")
    shown = screen.see("2.95 ┤")  # the curve of all steps
    assert any("gone" in line and "eval_loss 4 to 2" in line for line in shown), "what has ended, with its figures"
    assert any("step 1 " in line and "33" in line for line in shown)
    assert not any("›" in line for line in shown)

    def press(keys: str, words: str) -> list[str]:
        since = len(screen.raw)
        screen.press(keys)
        return screen.see(words, since=since)

    def marked() -> str:
        """The line that keys are about, in the last whole frame."""
        return next((line for line in screen.frames()[-1] if line.startswith("›")), "")

    def move(key: str, words: str) -> None:
        """Until the mark is on a line with these words: other tests of this process may have left jobs between."""
        while words not in (before := marked()):
            screen.press(key)
            wait_for(lambda: marked() not in ("", before), 120, f"the mark to leave {before!r}", screen.shown)

    press("\x1b[B", "›")
    move("\x1b[B", "› at work")
    move("j", " waits ")
    press("c", "cancel waits? y")
    press("n", "c cancel")
    assert api.http.get(f"/jobs/{waiting}").json()["status"] == "queued"
    press("c", "cancel waits? y")
    screen.press("y")
    wait_for(lambda: api.http.get(f"/jobs/{waiting}").json()["status"] == "cancelled", 60, "the end of the job")
    move("k", "› at work")
    press("\r", "bksp back")

    def alone() -> bool:
        """The opened job fills the screen: the frames before still show the list, with their new keys."""
        frame = "\n".join(screen.frames()[-1])
        return "33/66  1m 01s left" in frame and f"eft watch {at_work}" in frame

    wait_for(alone, 60, "the opened job alone", screen.shown)
    screen.press("p")
    wait_for(lambda: api.http.get(f"/jobs/{at_work}").json()["status"] == "pausing", 60, "the job to pause")
    since = len(screen.raw)
    screen.press("r")
    screen.see("not done", since=since)
    press("\x7f", "gone")
    screen.press("q")
    assert screen.end() == 0
    api.http.post(f"/jobs/{at_work}/cancel")


def test_leaving_gives_the_terminal_back(api: Any, terminals: list[Terminal]) -> None:
    job_id = api.submit(name="goes on")["id"]
    for leave, code in ((lambda one: one.press("\x03"), 130), (lambda one: one.process.terminate(), 143)):
        screen = Terminal([EFT, "watch", job_id], environment(api))
        terminals.append(screen)
        screen.see("goes on")
        leave(screen)
        assert screen.end() == code
    assert api.http.get(f"/jobs/{job_id}").json()["status"] == "queued"
    api.http.post(f"/jobs/{job_id}/cancel")


def test_in_a_pipe_it_is_lines(api: Any) -> None:
    job_id, token = api.start_job()
    api.tell(token, *steps(33), {"type": "notice", "code": "n", "message": "be\nwarned"})
    line, variables = [program(), "watch"], environment(api, FORCE_COLOR="1")
    watcher = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    told = ""
    while not ("step 33/66  loss 1.350  1m 01s left".replace("  ", " ") in told and "notice: be warned" in told):
        line = watcher.stdout.readline()
        assert line, told
        told += line
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(60) == 130
    assert "\x1b" not in told and all(re.match(r"\d\d:\d\d:\d\d ", line) for line in told.splitlines())
    assert f"{job_id} running: runs on box" in told
    api.end(token, Succeeded({}))


# --- frames ------------------------------------------------------------------------------------------


def world(jobs: int = 30) -> World:
    raw = {"id": f"job-{'0' * 26}", "created_at": "2026-11-21T09:00:00Z", "status": "running", "attempt": 2}
    raw |= {"progress": {"step": 5, "total_steps": 9, "seconds_left": 1e6}, "name": "näme " * 20 + "\x1b]0;evil\x07"}
    row = {"position": 1, "job": raw["id"], "name": raw["name"], "owner": "ada", "estimated_start": None}
    gpu = {"gpu": "box/0", "state": "busy", "kind": "gpu", "busy_percent": 93, "used_bytes": 5e10}
    return World(
        one=None,
        jobs=tuple(Watched(Job.parse(raw), (3.0, float("nan"), 1.0), "e", 1e6) for _ in range(jobs)),
        queue=tuple(row | {"reason": "waits " * 30} for _ in range(jobs)),
        gpus=tuple(gpu | {"memory_bytes": 2e11, "reason": None, "job": raw["id"]} for _ in range(jobs)),
        lines=tuple(Line(datetime.now(UTC), raw["id"], "w\n" * 50) for _ in range(jobs)),
        looked=True,
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_frame_fits_every_terminal(encoding: str) -> None:
    for jobs in (0, 1, 30):
        for one in (None, f"job-{'0' * 26}"):
            for columns, lines in ((20, 6), (40, 10), (80, 24), (99, 50), (250, 80)):
                file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
                console = Console(file=file, width=columns, height=lines, color_system=None)
                options = console.options.update(width=columns, height=lines)
                here = World(**{name: getattr(world(jobs), name) for name in World.__slots__} | {"one": one})
                drawn = "".join(
                    segment.text
                    for segment in console.render(Frame(here, "http://box"), options)
                    if not segment.control
                )
                rows = drawn.split("\n")
                assert len(rows) == lines, (jobs, columns, lines)
                assert all(Console().measure(row).maximum <= columns for row in rows), (jobs, columns, lines)
                assert not re.search(r"[\x00-\x09\x0b-\x1f]", drawn)


def test_sparklines() -> None:
    assert sparkline([], 8) == "" and sparkline([float("nan")], 8) == ""
    assert sparkline([2.0, 2.0], 8) == BARS[0] * 2
    assert sparkline([float(n) for n in range(8)], 8) == BARS
    assert sparkline([1.0, float("inf"), 0.0], 8) == f"{BARS[-1]} {BARS[0]}"
    assert sparkline([float(n) for n in range(800)], 8) == BARS
    assert sparkline([0.0, 1.0], 8, utf8=False) == "_@"


@pytest.mark.parametrize("utf8", [True, False])
def test_a_curve_has_axes_and_every_point_has_its_place(utf8: bool) -> None:
    falling = plot([(step, 10.0 - step) for step in range(11)], 60, 12, utf8)
    assert len(falling) == 12 and all(len(line) <= 60 for line in falling)
    assert [falling[row].split()[0] for row in (0, 5, 10)] == ["10", "5", "0"]
    assert falling[-1].split() == ["step", "0", "10"]
    firsts = [len(line) - len(line[5:].lstrip(" \u2800")) for line in falling[:11]]
    assert firsts == sorted(firsts), "it goes down to the right"
    assert plot([(1, float("nan")), (2, 1.0)], 60, 12, utf8) == [] and plot([(1, 1.0), (2, 2.0)], 20, 12, utf8) == []
    assert len(plot([(1, 2.0), (9, 2.0)], 60, 12, utf8)) == 12, "a flat one"


def test_more_than_was_asked_for_is_said() -> None:
    console = Console(file=io.StringIO(), width=100, height=30, color_system=None)
    console.print(Frame(world(30), "http://box"))
    assert "eft watch 20+ at work, 30 waiting" in console.file.getvalue()  # type: ignore[attr-defined]
