"""An attempt of a session in the process of another one: it has a lease, and neither slot nor child of its own."""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy.orm import Session

from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Token
from core.jobs.kinds import Kind
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, finish
from core.jobs.scheduling import runtime_estimates
from core.spec.run.frames import Frame, FrameError
from worker.attempt.context import DATABASE_AWAY, PatientDatabase, WorkerContext
from worker.attempt.sessions.bridge import SessionBridge
from worker.attempt.sessions.line import SharedChild

log = logging.getLogger("eft.worker")


class GuestAttempt:
    """As AttemptRunner, for a guest. The child's fence counts from the renewals of its host's lease, which are those of
    its own, in one transaction. Where its lease alone is lost, the child is killed with all that share it: nothing of
    the guest may run, and the others go on to the bit."""

    stepped = True
    """It imports and loads nothing."""

    def __init__(self, site: WorkerContext, claim: Claim, shared: SharedChild) -> None:
        self.site, self.claim, self.shared = site, claim, shared
        self.token: Token = claim.token
        self.began = time.monotonic()
        self.lost = threading.Event()
        self._inside = True
        """The child may have it."""
        self.over = threading.Event()
        """Its end is written, or cannot be."""
        self._database = PatientDatabase(site.database, self._gives_up)
        self._folder = site.layout.session(claim.token.job_id)
        self._bridge = SessionBridge(
            self._database, self.token, self._folder, site.layout.bells, shared.line, self.lose, alone=lambda: True
        )

    def run(self) -> None:
        """Raises where the end cannot be written; the child does not know the session any more then, or is gone."""
        try:
            outcome, code = self._attend()
            self._inside = False
            settings = self.site.settings
            policy = RetryPolicy(settings.max_machine_failures, settings.retry_backoff_seconds)
            end = self._database.write(lambda session: finish(session, self.token, Kind.SESSION, outcome, code, policy))
            log.info("attempt %d of %s, a guest: %s → %s", self.token.attempt, self.claim.label, outcome, end or "lost")
        finally:
            self.over.set()

    def lose(self) -> None:
        """Nothing of it may run any more. A lease is gone too once the end was written."""
        self.lost.set()
        if self._inside and not self.shared.ended.is_set():
            self.shared.child.kill()

    @property
    def ending(self) -> bool:
        """As AttemptRunner's."""
        return not self._inside

    def hurry(self) -> None:
        """The worker is leaving: its host is asked too, and takes it along."""

    def beat(self, held_at: float) -> None:
        """The child has its heartbeat from its host."""

    def _attend(self) -> tuple[Outcome, int | None]:
        """What became of it. Nothing of it runs any more when this returns."""
        defect: Failed | None = None
        try:
            position, fault = self._join()
            if fault is not None:
                return fault, None
            self._bridge.start(position)
            asked = self._until_asked()
            self._bridge.end()
            if asked is not None:
                self.shared.line.ask(self._frame("leave"))
                return Requeued(asked), None
        except (FrameError, OSError):
            pass  # the child is gone, or about to be
        except Exception as error:
            log.exception("attempt %d of %s, a guest", self.token.attempt, self.claim.label)
            defect = Failed("machine", "worker_error", f"the worker failed: {type(error).__name__}; see its log")
            self.lose()
        self.shared.ended.wait()
        self._bridge.end()
        assert self.shared.outcome is not None
        return defect or self.shared.outcome, self.shared.code

    def _join(self) -> tuple[int, Failed | None]:
        """Its position in the child; or why it cannot be there."""
        answer = self.shared.line.ask(self._frame("join", str(self._folder))).header
        if not answer["ok"]:
            error = answer["error"]
            return 0, Failed("machine", error["code"], f"it cannot share a process: {error['message']}")

        def joined(session: Session) -> None:
            claims.started(session, self.token, self.shared.child.pid, self.shared.child.started)
            claims.running(session, self.token)
            runtime_estimates.began(session, self.token)

        self._database.write(joined)
        return int(answer["result"]["position"]), None

    def _until_asked(self) -> str | None:
        """Wait until it is to leave; why. None: the child goes with it."""
        while not self.shared.ended.wait(self.site.settings.relay_seconds):
            try:
                with self.site.database.read() as session:
                    stop = claims.stop_requested(session, self.token)
            except DATABASE_AWAY as error:
                log.warning("database: %s", error)  # without a renewed lease the child ends itself
                continue
            if stop is None:
                self.lose()
            elif stop:
                return StopReason(stop).message(self.site.node)
        return None

    def _frame(self, verb: str, value: object = True) -> Frame:
        return Frame({"session": self.token.job_id, verb: value})

    def _gives_up(self, seconds: float) -> bool:
        return self.lost.is_set() or self.site.abandon.wait(seconds)
