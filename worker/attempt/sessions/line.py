"""The way to a session's child, which other sessions of the same base may share, each with a bridge of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core.jobs.lifecycle.finish import Failed, Outcome, Requeued
from core.spec.run.frames import Frame, FrameError, receive, send
from worker.attempt.child import Child


class SessionLine:
    """Frames to a child and its answers. Each session waits for its own; the child takes the frames of the sessions in
    turns, and several at once where it can."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._asked = 0
        self._answers: dict[int, Frame] = {}
        self._fault: Exception | None = None
        self._reader = threading.Thread(target=self._read, name="eft-session-line", daemon=True)

    def hello(self) -> Frame | None:
        """Wait for the child's first word; None: it has ended before. Call it once, before all else."""
        first = receive(self._stream)
        if first is not None:
            self._reader.start()  # always: a child that cannot send its answers takes no frames
        return first

    def ask(self, frame: Frame) -> Frame:
        """Raises FrameError and OSError where the child has gone."""
        (answer,) = self.ask_all([frame])
        return answer

    def ask_all(self, frames: Sequence[Frame]) -> list[Frame]:
        """Send the frames of one session, and wait for the answers to all of them. Raises as `ask`."""
        with self._sending:
            numbers = range(self._asked, self._asked + len(frames))
            self._asked += len(frames)
            for number, frame in zip(numbers, frames, strict=True):
                send(self._stream, Frame(frame.header | {"id": number}, frame.body))
        with self._news:
            self._news.wait_for(lambda: self._fault is not None or all(one in self._answers for one in numbers))
            if self._fault is not None:
                raise FrameError(f"the child did not answer: {self._fault}") from self._fault
            return [self._answers.pop(one) for one in numbers]

    def tell(self, header: dict[str, Any]) -> None:
        """Send what has no answer. Raises OSError where the child has gone."""
        with self._sending:
            send(self._stream, Frame(header))

    def shut(self) -> None:
        """End it for all who wait; safe to call from any thread."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Call it after `shut`."""
        if self._reader.ident is not None:
            self._reader.join()
        self._stream.close()

    def _read(self) -> None:
        fault: Exception = FrameError("it closed the stream")
        try:
            while (answer := receive(self._stream)) is not None:
                with self._news:
                    self._answers[int(answer.header["id"])] = answer
                    self._news.notify_all()
        except (FrameError, OSError, KeyError, TypeError, ValueError) as error:
            fault = error
        with self._news:
            self._fault = fault
            self._news.notify_all()


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
