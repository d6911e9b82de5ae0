"""Requests that wait for the result of an operation."""

from __future__ import annotations

import math
from functools import partial

from fastapi import Request

from api.auth.policy import Principal
from api.http.waiting import until
from api.sessions.service import Sessions
from api.sessions.wakes import Wakes
from core.db.tables import SessionOperation
from core.jobs.base.states import FINAL, Status
from core.jobs.lifecycle.sessions.records import FoundSession

Seen = tuple[FoundSession, SessionOperation, bytes]


async def result(
    sessions: Sessions, request: Request, principal: Principal, session_id: str, position: int, wait: float
) -> Seen:
    """The session, an operation of it, and the arrays of its result, once there is one or the session has ended, or
    after `wait` seconds."""
    look = partial(sessions.look, principal, session_id, position)
    wakes: Wakes = request.app.state.eft.wakes
    rung = partial(wakes.of, session_id, position)
    return await until(_over, look, wait, first=math.inf, longest=math.inf, request=request, rung=rung)


def _over(seen: Seen) -> bool:
    found, row, _ = seen
    return row.done_at is not None or Status(found.job.status) in FINAL
