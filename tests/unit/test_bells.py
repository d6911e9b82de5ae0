"""Bells between processes of a box, by real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path

from api.http.waiting import until
from api.sessions.wakes import Wakes
from core.base import bells
from core.storage.layout import Layout


def test_a_ring_wakes_whoever_waits_however_long_the_path_is(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120) / "bells"
    folder.parent.mkdir()
    bell = bells.Bell(folder, "session-1-1")
    assert not bell.wait(0.0)
    threading.Timer(0.05, bells.ring, (folder, "session-1-*", "one")).start()
    assert bell.wait(60.0)
    for what in ("one", "two", "one"):
        bells.ring(folder, "session-*", what)
    assert bell.heard() == {"one", "two"} and not bell.heard()
    bell.close()
    assert not [*folder.iterdir()]


def test_the_bell_of_a_process_that_was_killed_is_taken_down(tmp_path: Path) -> None:
    bells.Bell(tmp_path, "gone")._socket.close()
    stays = bells.Bell(tmp_path, "there")
    bells.ring(tmp_path, "*", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and stays.heard() == {"x"}
    again = bells.Bell(tmp_path, "there")  # after a kill, under the same name
    bells.ring(tmp_path, "there", "y")
    assert again.heard() == {"y"} and not stays.heard()
    for bell in (again, stays):
        bell.close()


def test_a_full_bell_is_no_hindrance(tmp_path: Path) -> None:
    bell = bells.Bell(tmp_path, "full")
    for _ in range(5000):
        bells.ring(tmp_path, "full", "x")
    assert bell.heard() == {"x"}
    bell.close()


def test_a_result_is_looked_for_when_it_is_rung_for(tmp_path: Path) -> None:
    layout = Layout(tmp_path)

    async def waited(ring: str, pause: float) -> tuple[bool, float]:
        wakes, looks, done = Wakes(layout), [], threading.Event()
        wakes.start()

        def look() -> bool:
            looks.append(1)
            if len(looks) == 1:  # the end comes right behind the first look
                done.set()
                bells.ring(layout.bells, "api-*", ring)
                return False
            return done.is_set()

        began = time.monotonic()
        found = await until(bool, look, 3600.0, first=pause, longest=pause, rung=lambda: wakes.of("session-1", 4))
        wakes.close()
        return found, time.monotonic() - began

    assert asyncio.run(waited("session-1.4", pause=3000.0))[0], "without the ring it would wait for an hour"
    found, seconds = asyncio.run(waited("session-1.3", pause=0.5))
    assert found and seconds >= 0.5, "the end of an operation before it"


def test_many_that_wait_look_seldom_and_a_ring_wakes_all_before_it(tmp_path: Path) -> None:
    """The results of 2,000 samples are told by few looks, also where rings are lost."""

    async def wait() -> int:
        layout = Layout(tmp_path / "data")
        layout.create()
        wakes, looks, answered = Wakes(layout), [0], [0]
        wakes.start()

        def look(position: int) -> bool:
            looks[0] += 1
            return position <= answered[0]

        def one(position: int) -> asyncio.Task[bool]:
            rung = partial(wakes.of, "session-1", position)
            found = until(bool, partial(look, position), 3600.0, first=0.1, longest=0.1, rung=rung, pace=wakes.pause)
            return asyncio.create_task(found)

        assert wakes.pause() == 0.0
        waiting = [one(position) for position in range(1, 2001)]
        while looks[0] < 2000:
            await asyncio.sleep(0.01)
        assert wakes.pause() == 10.0
        answered[0] = 1999
        bells.ring(layout.bells, "api-*", "session-1.1999")
        await asyncio.gather(*waiting[:-1])
        assert not waiting[-1].done()
        answered[0] = 2000
        bells.ring(layout.bells, "api-*", "session-1.2000")
        assert await waiting[-1]
        wakes.close()
        assert wakes.pause() == 0.0
        return looks[0]

    assert asyncio.run(wait()) < 6000
