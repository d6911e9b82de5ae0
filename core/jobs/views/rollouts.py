"""Answers that a job has sampled, as its trainer keeps them: a file of JSON lines for each rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.spec.run.folder import ROLLOUTS, rollout_file, rollout_tokens_file
from core.storage.layout import Layout
from core.storage.store import Store

PAGE_BYTES = 1 << 20
"""Bytes of answers in a page at most, its first answer aside."""
PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Some answers of a rollout."""

    answers: list[dict[str, Any]]
    more: bool
    """Whether there are answers behind them."""


def newest_rollout(store: Store, layout: Layout, job_id: str, attempts: int) -> int | None:
    """Number of the last rollout that a job has made; None where there is none. StoreAway."""
    for folder in _folders(layout, job_id, attempts):
        names = (entry.key.rpartition("/")[2].partition(".") for entry in store.tree(folder))
        if found := [int(stem) for stem, _, ending in names if ending == "jsonl" and stem.isdecimal()]:
            return max(found)
    return None


def rollout_page(
    store: Store,
    layout: Layout,
    job_id: str,
    attempts: int,
    number: int,
    *,
    skip: int,
    limit: int,
    tokens: bool = False,
) -> RolloutPage | None:
    """Read at most `limit` answers of a rollout behind the first `skip`, as the newest attempt that has made it wrote
    them; with `tokens`, the tokens of these answers. None where none has. StoreAway, OSError."""
    for folder in _folders(layout, job_id, attempts):
        key = f"{folder}/{rollout_tokens_file(number) if tokens else rollout_file(number)}"
        if (size := store.size(key)) is None:
            continue
        answers: list[dict[str, Any]] = []
        left = PAGE_BYTES
        for at, line in enumerate(_lines(store, key, size)):
            if at < skip:
                continue
            if len(answers) == limit or (answers and len(line) > left):
                return RolloutPage(answers, True)
            left -= len(line)
            answers.append(json.loads(line))
        return RolloutPage(answers, False)
    return None


def _folders(layout: Layout, job_id: str, attempts: int) -> Iterator[str]:
    """Keys of the folders of rollouts, that of the newest attempt first."""
    for attempt in range(attempts, 0, -1):
        yield f"{layout.attempt(job_id, attempt).relative_to(layout.root)}/{ROLLOUTS}"


def _lines(store: Store, key: str, size: int) -> Iterator[bytes]:
    """Lines of an object, read as far as they are asked for."""
    source = store.open(key, size=size, start=0, length=size)
    rest = b""
    try:
        while piece := source.read(PIECE):
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
    finally:
        source.close()
    if rest:
        yield rest
