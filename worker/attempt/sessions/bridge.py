"""Between the log of a session in the database and its child: one operation after another, in the order of the log.

The child says which operation its snapshot holds. Whatever the log has behind that is sent again, those that were
answered before too: their results are held against what the caller was told, and written nowhere. So an attempt ends
where the one before would have, to the bit.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sqlalchemy.orm import Session

from core.base import bells
from core.base.files import write_private
from core.db.tables import SessionOperation
from core.jobs.base.transitions import Token
from core.jobs.lifecycle.sessions import log as session_log
from core.jobs.scheduling import runtime_estimates
from core.spec.run.frames import Frame, FrameError
from core.spec.session.verbs import READ_ONLY
from worker.attempt.context import PatientDatabase
from worker.attempt.sessions.line import SessionLine

log = logging.getLogger("eft.worker")

POLL_SECONDS = 0.01
"""Between two looks for the next operation, right after the last one, as long as nobody rings when one comes."""
SLOW_POLL_SECONDS = 0.25
"""The same once none has come for a while."""
QUICK_SECONDS = 10.0
SNAPSHOT_SECONDS = 60.0
"""Computation after which a snapshot is taken, so that no more has to be replayed."""
SNAPSHOT_OPERATIONS = 500
RUN_ANSWERS = 64
"""Answers that a session asks its child for at once; a child draws as many in one batch."""


class SessionBridge:
    """Feeds a session's child from its log, in a thread of its own. `lose` is called when another attempt has the
    session."""

    def __init__(
        self,
        database: PatientDatabase,
        token: Token,
        folder: Path,
        bells_folder: Path,
        line: SessionLine,
        lose: Callable[[], None],
        *,
        alone: Callable[[], bool],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`alone`: whether nobody shares the child, so that it may leave with this session. `ready` is called once the
        child answers."""
        self._database, self._token, self._folder, self._line = database, token, folder, line
        self._idle_seconds, self._exact, self._lose = math.inf, False, lose
        self._alone, self._ready = alone, ready
        self._position = 0
        self._worked = 0.0
        self._unsaved = 0
        self._snapshot = 0
        self._ended = threading.Event()
        self._bells = bells_folder
        self._name = f"{token.job_id}-{token.attempt}"
        self._bell = bells.hung(bells_folder, self._name)
        self._woken = self._rung = False
        """By a ring, the last time; and whether operations come with one, so that few looks are enough."""
        self._thread = threading.Thread(target=self._run, name=f"eft-session-{token.job_id[-6:]}", daemon=True)
        self._joined: int | None = None

    def start(self, position: int | None = None) -> None:
        """`position`: of a session that has joined a child; None: the child is this session's own."""
        self._joined = position
        self._thread.start()

    def end(self, seconds: float | None = None) -> None:
        """Pass nothing on any more; returns once the operation that is computed has been answered, or the child is
        gone, or after so many seconds."""
        self._ended.set()
        bells.ring(self._bells, self._name, "")
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._bell is not None:
            self._bell.close()

    def close(self) -> None:
        """End it and its line; the child has ended, or is about to be."""
        self._ended.set()
        self._line.shut()
        self.end(30.0)
        self._line.close()

    def _run(self) -> None:
        try:
            position = self._joined
            if position is None:
                hello = self._line.hello()
                if hello is None:
                    return  # the child has ended before it was ready: its exit status says why
                position = int(hello.header["position"])
                self._database.write(lambda session: runtime_estimates.began(session, self._token))
                self._ready()
            self._position = self._snapshot = position
            spec = self._database.read(lambda session: session_log.spec_of(session, self._token.job_id))
            if spec is None:
                return
            self._idle_seconds, self._exact = spec.idle_seconds, spec.exact
            self._feed()
        except (FrameError, OSError) as error:
            if not self._ended.is_set():
                log.warning("%s: its child is gone: %s", self._token.job_id, error)
        except Exception:
            log.exception("%s: its operations cannot be passed on", self._token.job_id)
            self._lose()

    def _feed(self) -> None:
        quiet_since = time.monotonic()
        while not self._ended.is_set():
            rows = self._database.read(lambda session: session_log.undone(session, self._token.job_id, self._position))
            if rows is None:
                return
            for run in _runs(rows):
                if self._ended.is_set():
                    return
                self._pass_on(run)
                quiet_since = time.monotonic()
            if rows:
                self._rung = self._woken
                continue
            quiet = time.monotonic() - quiet_since
            if quiet > self._idle_seconds and self._unsaved == 0 and self._alone() and self._park():
                return
            if quiet > min(self._idle_seconds, QUICK_SECONDS) and self._unsaved:
                self._take_snapshot()
            self._rest(POLL_SECONDS if quiet < QUICK_SECONDS and not self._rung else SLOW_POLL_SECONDS)

    def _rest(self, seconds: float) -> None:
        if self._bell is None:
            self._ended.wait(seconds)
        else:
            self._woken = self._bell.wait(seconds)

    def _pass_on(self, rows: Sequence[SessionOperation]) -> None:
        """Have operations computed, and write down what they came to unless that was done before."""
        first = rows[0]
        replayed = first.done_at is not None
        reading = first.operation["op"] in READ_ONLY
        if replayed and (reading or first.error is not None):
            self._position = first.position  # it has left no trace
            return
        began = time.monotonic()
        answers = self._line.ask_all([self._frame(row) for row in rows])
        self._worked += time.monotonic() - began
        self._position = rows[-1].position
        self._unsaved += 0 if reading else len(rows)
        if replayed:
            self._compare(first, answers[0])
        elif not self._write(rows, answers):
            return
        self._line.tell({"session": self._token.job_id, "recorded": self._position})
        if self._worked > SNAPSHOT_SECONDS or self._unsaved >= SNAPSHOT_OPERATIONS:
            self._take_snapshot()

    def _frame(self, row: SessionOperation) -> Frame:
        tensors = session_log.tensors_of(self._folder, row)
        header = {"position": row.position, "identity": f"{row.sha256}-{row.position}"}
        header |= {"session": self._token.job_id, "exact": self._exact, "op": row.operation}
        return Frame(header, tensors)

    def _write(self, rows: Sequence[SessionOperation], answers: Sequence[Frame]) -> bool:
        """Write the answers down in one transaction, since all of their callers wait; False: another attempt has the
        session."""
        sums: list[str | None] = []
        for row, answer in zip(rows, answers, strict=True):
            sums.append(hashlib.sha256(answer.body).hexdigest() if answer.body else None)
            if answer.body:
                write_private(session_log.result_path(self._folder, row.position), answer.body)

        def write(session: Session) -> bool:
            return all(
                session_log.answer(
                    session,
                    self._token,
                    row.position,
                    result=answer.header.get("result"),
                    error=answer.header.get("error"),
                    size=len(answer.body),
                    sha256=sha256,
                )
                for row, answer, sha256 in zip(rows, answers, sums, strict=True)
            )

        if not self._database.write(write):
            self._lose()
            self._ended.set()
            return False
        bells.ring(self._bells, "api-*", f"{self._token.job_id}.{rows[-1].position}")
        return True

    def _compare(self, row: SessionOperation, answer: Frame) -> None:
        sha256 = hashlib.sha256(answer.body).hexdigest() if answer.body else None
        if answer.header.get("result") != row.result or sha256 != row.result_sha256:
            log.error(
                "%s: operation %d, replayed, came to something else than its caller was told",
                self._token.job_id,
                row.position,
            )

    def _take_snapshot(self) -> None:
        answer = self._line.ask(Frame({"session": self._token.job_id, "snapshot": True}))
        if not answer.header["ok"]:
            raise FrameError(f"no snapshot was taken: {answer.header.get('error')}")
        position, older = int(answer.header["result"]["position"]), self._snapshot
        self._database.write(lambda session: session_log.snapshotted(session, self._token, position, older))
        self._snapshot, self._worked, self._unsaved = position, 0.0, 0
        session_log.remove_tensors(self._folder, older)  # two snapshots hold them

    def _park(self) -> bool:
        return bool(self._database.write(lambda session: session_log.park(session, self._token, self._idle_seconds)))


def _runs(rows: Sequence[SessionOperation]) -> Iterator[list[SessionOperation]]:
    """The operations in their order; those that draw answers, one after another, together, as many as the child may
    take into one batch."""
    run: list[SessionOperation] = []
    for row in rows:
        draws = row.operation["op"] == "generate" and row.done_at is None
        if run and not (draws and sum(map(_weight, run)) + _weight(row) <= RUN_ANSWERS):
            yield run
            run = []
        run.append(row)
        if not draws:
            yield run
            run = []
    if run:
        yield run


def _weight(row: SessionOperation) -> int:
    """Answers that an operation asks for, at least; or more, where it is large."""
    return max(int(row.operation["num_samples"]), row.tensor_bytes >> 14)
