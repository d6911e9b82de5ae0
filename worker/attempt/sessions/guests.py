"""The sessions that share the process of another one, as the attempt has them whose process it is."""

from __future__ import annotations

from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Outcome
from worker.attempt.child import Child
from worker.attempt.context import WorkerContext
from worker.attempt.sessions.guest import GuestAttempt
from worker.attempt.sessions.line import SessionLine, SharedChild


class Guests:
    """None until the child of the host answers (`open`)."""

    def __init__(self, site: WorkerContext) -> None:
        self._site = site
        self._shared: SharedChild | None = None
        self._attempts: list[GuestAttempt] = []

    def open(self, line: SessionLine, child: Child) -> None:
        """The child answers: others may join it from now on."""
        self._shared = SharedChild(line, child)
        self._site.invite()

    def room(self) -> bool:
        """Whether the child is there, and may take another session in."""
        if self._shared is None or self._shared.ended.is_set():
            return False
        self._attempts = [guest for guest in self._attempts if not guest.over.is_set()]
        return len(self._attempts) < self._site.settings.session_guests

    def admit(self, claim: Claim) -> GuestAttempt:
        """Let a session in for which there is room. The caller runs it, in a thread of its own."""
        assert self._shared is not None
        guest = GuestAttempt(self._site, claim, self._shared)
        self._attempts.append(guest)
        return guest

    def gone(self) -> bool:
        """Whether the host is alone."""
        return all(guest.over.is_set() for guest in self._attempts)

    def see_out(self, outcome: Outcome, code: int | None) -> None:
        """The child is gone: each guest writes its end, before anybody else gets the slot."""
        if self._shared is None or self._shared.ended.is_set():
            return
        self._shared.end(outcome, code)
        for guest in self._attempts:
            guest.over.wait()
