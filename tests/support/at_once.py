"""Functions on one database in processes of their own, which are forks of the test's: nothing is imported again."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from core.db.engine import Database
from tests.support.killed_change import url_of

T = TypeVar("T")


def at_once(database: Database, *calls: Callable[[Database], T], seconds: float = 200) -> list[T]:
    """What each call returns, in a process and with connections of its own. They begin together."""
    database.dispose()  # neither a socket nor what SQLite knows of its locks goes along
    fork = multiprocessing.get_context("fork")
    barrier, lines, processes = fork.Barrier(len(calls)), list[Connection](), list[Any]()
    for call in calls:
        line, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(url_of(database), call, barrier, theirs, seconds), daemon=True)
        process.start()
        theirs.close()
        lines.append(line)
        processes.append(process)
    found = [line.recv() if line.poll(seconds) else (False, f"nothing after {seconds:g} s") for line in lines]
    for process in processes:
        process.kill()  # each has answered or never will
        process.join()
    faults = [said for well, said in found if not well]
    assert not faults, "\n".join(faults)
    return [said for _, said in found]


def _child(url: str, call: Callable[[Database], Any], barrier: Any, line: Connection, seconds: float) -> None:
    try:
        barrier.wait(seconds)
        database = Database(url)
        said = True, call(database)
        database.dispose()
    except BaseException:
        said = False, traceback.format_exc()
    line.send(said)
    os._exit(0)
