"""The client against a server that is up, which EFT_URL and EFT_API_KEY name. Nothing of the service is imported."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from eft import AsyncClient, Client

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A training file that no project has yet."""
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"lamp {uuid.uuid4().hex} on", "completion": "lamp.on"} for _ in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Waited:
    """An asynchronous object, called as a synchronous one: a test is written once and holds both clients."""

    def __init__(self, portal: Any, inner: Any) -> None:
        self._portal, self._inner = portal, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return Waited(self._portal, found) if type(found).__module__.startswith("eft.aio") else found

        def call(*arguments: Any, **options: Any) -> Any:
            answer = found(*arguments, **options)
            if hasattr(answer, "__aiter__"):
                return self._drain(answer)
            return self._portal.call(_awaited, answer) if hasattr(answer, "__await__") else answer

        return call

    def _drain(self, items: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._portal.call(items.__anext__)
            except StopAsyncIteration:
                return


async def _awaited(answer: Any) -> Any:
    return await answer


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Either client, called alike."""
    if request.param == "sync":
        with Client() as here:
            yield here
        return
    with anyio.from_thread.start_blocking_portal() as portal:
        opened = portal.call(_open)
        yield Waited(portal, opened)
        portal.call(opened.aclose)


async def _open() -> AsyncClient:
    return AsyncClient()


@pytest.fixture(autouse=True)
def server() -> str:
    url = os.environ.get("EFT_URL")
    assert url, "EFT_URL and EFT_API_KEY name a server to test against"
    return url
