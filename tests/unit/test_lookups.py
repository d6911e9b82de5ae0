"""A webhook's host is looked up without holding up anybody, however slow its name server is."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from api.errors import BadRequest
from api.notices import lookups
from api.notices.lookups import Lookups
from tests.support.service import wait_for


class NameServer:
    """Answers once it is told to."""

    def __init__(self, address: str) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self._address = address

    def __call__(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked += 1
        assert self.answers.wait(60)
        return [(2, 1, 6, "", (self._address, port))]


def test_a_slow_name_server_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "SECONDS", 0.2)
    server = NameServer("10.0.0.1")
    checks = Lookups(server)

    async def ask() -> float:
        began = time.monotonic()
        await asyncio.gather(*(checks.check("lab", "https://slow.example/", ()) for _ in range(60)))
        await asyncio.gather(*(checks.check(f"p{at}", "https://slow.example/", ()) for at in range(60)))
        await checks.check("lab", "https://slow.example/", ())
        return time.monotonic() - began

    took = asyncio.run(ask())
    wait_for(lambda: server.asked >= lookups.AT_ONCE, 60, "threads that have begun and not asked yet")
    assert server.asked == lookups.AT_ONCE, "one of a project, and so many in all"
    assert took < 30, "121 times the limit would be 24 s and more"
    server.answers.set()


def test_what_is_found_in_time_is_told() -> None:
    server = NameServer("10.0.0.1")
    server.answers.set()
    checks = Lookups(server)
    for url in ("https://inside.example/", "https://127.0.0.1/", "https://[::1]/"):
        with pytest.raises(BadRequest) as refusal:
            asyncio.run(checks.check("lab", url, ()))
        assert refusal.value.code == "address_not_allowed"
    assert server.asked == 1, "an address needs no look-up"
    asyncio.run(checks.check("lab", "https://inside.example/", ("inside.example",)))
