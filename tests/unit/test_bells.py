"""Bells between processes of a box, by real sockets."""

from __future__ import annotations

import asyncio
import math
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
        wakes, looks, done = Wakes(layout, lambda session_id, least: ("running", [])), [], threading.Event()
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


def test_one_looks_for_all_who_wait_and_a_ring_wakes_all_before_it(tmp_path: Path) -> None:
    """The results of 2,000 samples are told by two looks of each request, and few for all; also where nobody rings."""

    async def wait() -> tuple[int, int]:
        layout = Layout(tmp_path / "data")
        layout.create()
        looks, for_all, answered = [0], [0], [0]
        status = ["running"]

        def look_for_all(session_id: str, least: int) -> tuple[str, list[int]]:
            for_all[0] += 1
            return status[0], [position for position in range(least, 2001) if position <= answered[0]]

        wakes = Wakes(layout, look_for_all)
        wakes.start()

        def look(position: int) -> bool:
            looks[0] += 1
            return position <= answered[0] or status[0] == "failed"

        def one(position: int) -> asyncio.Task[bool]:
            rung = partial(wakes.of, "session-1", position)
            found = until(bool, partial(look, position), 3600.0, first=math.inf, longest=math.inf, rung=rung)
            return asyncio.create_task(found)

        waiting = [one(position) for position in range(1, 2001)]
        while looks[0] < 2000:
            await asyncio.sleep(0.01)
        answered[0] = 1000  # nobody rings
        await asyncio.gather(*waiting[:1000])
        answered[0] = 1999
        bells.ring(layout.bells, "api-*", "session-1.1999")
        await asyncio.gather(*waiting[:-1])
        assert not waiting[-1].done()
        status[0] = "failed"
        assert await waiting[-1], "the end of the session is the end of waiting"
        wakes.close()
        return looks[0], for_all[0]

    looks, for_all = asyncio.run(wait())
    assert looks == 4000 and for_all < 1000
