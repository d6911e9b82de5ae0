"""The way to a session's child, which other sessions of the same base may share, each with a bridge of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.jobs.lifecycle.finish import Failed, Outcome, Requeued
from core.spec.run.frames import Frame, FrameError, receive, send
from worker.attempt.child import Child


class SessionLine:
    """Frames to a child and its answers, one at a time. Who has come first has the first turn, and each session asks
    for one thing at a time, so that all of them get on alike."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._turns = threading.Condition()
        self._taken = self._over = 0

    def hello(self) -> Frame | None:
        """Wait for the child's first word; None: it has ended before."""
        return receive(self._stream)

    def ask(self, frame: Frame) -> Frame:
        """Raises FrameError and OSError where the child has gone."""
        with self._turn():
            send(self._stream, frame)
            answer = receive(self._stream)
        if answer is None:
            raise FrameError("the child closed the stream before it had answered")
        return answer

    def shut(self) -> None:
        """End it for all who wait; safe to call from any thread."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stream.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns:
            mine = self._taken
            self._taken += 1
            self._turns.wait_for(lambda: self._over == mine)
        try:
            yield
        finally:
            with self._turns:
                self._over += 1
                self._turns.notify_all()


@dataclass(slots=True)
class SharedChild:
    """A session's child as the sessions see it that share it with its host, which holds lease and slot."""

    line: SessionLine
    child: Child
    ended: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None
    """What becomes of the guests; set with `ended`."""
    code: int | None = None
    """Exit status of the child; set with `ended`."""

    def end(self, outcome: Outcome, code: int | None) -> None:
        """The child is gone, and this became of its host."""
        self.outcome, self.code = of_guest(outcome), code
        self.ended.set()


def of_guest(outcome: Outcome) -> Outcome:
    """What becomes of a session when the process ends that it shared."""
    match outcome:
        case Failed(code="max_runtime"):
            return Requeued("the session whose process it shared has used up its time")
        case Failed():
            return of_shared(outcome)
        case Requeued():
            return Requeued("the session whose process it shared has left its slot")
    return outcome


def of_shared(outcome: Outcome) -> Outcome:
    """An outcome of a process with several sessions in it. Any of them may be the cause of a failure: each is tried
    again, and after one more (core/jobs/lifecycle/sessions/sharing.py) by itself."""
    if isinstance(outcome, Failed) and outcome.code != "max_runtime":
        return Failed("machine", outcome.code, outcome.message, outcome.field, outcome.prepare_again)
    return outcome
