"""A worker in which one call fails, for tests: Python imports this at its start when the folder is on PYTHONPATH.

`EFT_TEST_FAULTS` names a folder. While it holds a file `finish.prepare`, say, the next call of `finish` for that phase
takes the file away and raises OverflowError; all else runs as it is. A file with `2` in it is good for two calls.

- `claim.PHASE`: core.jobs.lifecycle.claims.claim, once it has claimed a job of that phase, before the commit
- `take.PHASE`: core.jobs.lifecycle.claims.take, which writes down the claim of one job
- `attempt.PHASE`: worker.attempt.attempt.AttemptRunner, made of a claim that is committed
- `with_shape.prepare`: worker.orders.with_shape
- `finish.PHASE`: core.jobs.lifecycle.finish.finish
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("EFT_TEST_FAULTS", "."))
_import = builtins.__import__


def strike(place: str) -> None:
    path = FOLDER / place
    try:
        left = int(path.read_text() or 1) - 1
    except FileNotFoundError:
        return
    path.write_text(str(left)) if left else path.unlink()
    raise OverflowError(f"int too large to convert to float ({place})")


def failing(real: Callable[..., Any], name: str, phase: Callable[..., str | None], *, late: bool = False) -> Any:
    def called(*given: Any, **named: Any) -> Any:
        answer = real(*given, **named) if late else None
        if (which := phase(answer, *given)) is not None:
            strike(f"{name}.{which}")
        return answer if late else real(*given, **named)

    return called


def _break() -> None:
    claims, loop = sys.modules["core.jobs.lifecycle.claims"], sys.modules["worker.agent.claim_loop"]
    attempt, orders = sys.modules["worker.attempt.attempt"], sys.modules["worker.orders"]
    claims.claim = failing(claims.claim, "claim", lambda found, *_: None if found is None else found.kind, late=True)
    claims.take = failing(claims.take, "take", lambda _, session, job, worker, node, slots, lease: slots[0].phase)
    orders.with_shape = failing(orders.with_shape, "with_shape", lambda *_: "prepare")
    attempt.finish = failing(attempt.finish, "finish", lambda _, session, token, kind, *rest: kind)
    loop.AttemptRunner = failing(loop.AttemptRunner, "attempt", lambda _, site, claim, *rest: claim.kind)


def _watch(name: str, *rest: Any, **more: Any) -> Any:
    module = _import(name, *rest, **more)
    agent = sys.modules.get("worker.agent.agent")
    if agent is not None and hasattr(agent, "cpu_slots"):  # its last line
        builtins.__import__ = _import
        _break()
    return module


if "EFT_TEST_FAULTS" in os.environ:
    builtins.__import__ = _watch
