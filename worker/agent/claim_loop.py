"""Claims for the free slots of a box, one job after another, and knows what runs there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from core import __version__
from core.base.clock import boottime
from core.jobs import installation
from core.jobs.lifecycle import claims, lease_expiry, requeue
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.sessions import sharing
from worker.attempt.attempt import AttemptRunner
from worker.attempt.context import DATABASE_AWAY, WorkerContext
from worker.attempt.sessions.guest import GuestAttempt
from worker.preflight import node
from worker.upkeep.disk_room import Room

log = logging.getLogger("eft.worker")

CLAIM_TRIES = 4
"""Jobs that cannot be claimed, and are put aside, before a slot waits for the next ring."""
STARTING_SECONDS = 30.0
"""A job is left alone by the next standby trainer or fork server until its first step, or for this long."""


class ClaimLoop:
    """`serve` is called by the threads of the pool. `fit` says whether a slot may be used now, apart from what runs
    there."""

    def __init__(
        self, context: WorkerContext, worker: str, slots: Sequence[Slot], room: Room, fit: Callable[[Slot], bool]
    ) -> None:
        self.unheard = False
        """A claim may have been won without our hearing of it."""
        self.unfit = ""
        """Why this version may claim nothing any more, in words."""
        self._context, self._settings, self._worker = context, context.settings, worker
        self._slots, self._room, self._fit = slots, room, fit
        self._claiming = threading.Lock()
        context.invite = self.invite
        self._astray = False
        """The database may say that a slot is taken under which nothing runs here."""
        self._busy: dict[str, AttemptRunner | GuestAttempt] = {}
        """By slot; guests, which have none, by job."""
        self._idle = threading.Condition()

    def serve(self) -> None:
        """Run what this box can run, one job after another, until nothing can be claimed. One call a wake-up."""
        while (attempt := self._claim()) is not None:
            written = False
            try:
                attempt.run()
                written = True
            except Exception:
                log.exception("%s: the end of attempt %d was not written", attempt.claim.label, attempt.token.attempt)
            finally:
                with self._idle:
                    for slot in attempt.claim.slots:
                        del self._busy[slot.id]
                    self._idle.notify_all()
                self._astray = self._astray or not written

    def attempts(self) -> list[AttemptRunner | GuestAttempt]:
        """What runs now; a job of several slots is there once."""
        return list({attempt.token: attempt for attempt in list(self._busy.values())}.values())

    def starting(self) -> bool:
        """A job is on its way to its first step, or there will be none: not the time to import torch beside it."""
        if self._context.leaving.is_set():
            return True
        recent = time.monotonic() - STARTING_SECONDS
        return any(attempt.began > recent and not attempt.stepped for attempt in self.attempts())

    def wait_until_idle(self, deadline: float) -> None:
        with self._idle:
            while self._busy and time.monotonic() < deadline:
                self._idle.wait(1.0)

    def clear(self) -> None:
        """Give back what holds slots here and does not run. Raises DATABASE_AWAY."""
        with self._claiming:
            self._requeue_unheard()
            self._clear_slots()

    def fits(self) -> bool:
        """False: the API has been upgraded past this worker, which cannot read its jobs. What runs goes on."""
        standing = installation.standing(self._context.database, __version__)
        unfit = "" if standing.fit else f"this worker claims nothing: {standing.words}"
        if unfit != self.unfit:
            log.log(logging.ERROR if unfit else logging.WARNING, "%s", unfit or "this worker fits the API again")
            self.unfit = unfit
        return not unfit

    def _claim(self) -> AttemptRunner | None:
        """One thread of this box at a time, so that a claim that finds nothing never makes a slot look taken."""
        with self._claiming:
            try:
                self._requeue_unheard()
                self._clear_slots()
                if not self.fits():
                    return None
                for slot in self._slots:
                    if not self._offered(slot):
                        continue
                    if self._room.left() < 0:
                        return None
                    if (attempt := self._claim_for(slot)) is not None:
                        return attempt
                self._share()
            except DATABASE_AWAY as error:
                log.warning("cannot claim, database: %s", error)
                return None
        return None

    def invite(self) -> None:
        """A process has become ready that sessions may share which wait already. Never raises."""
        with self._claiming:
            try:
                self._requeue_unheard()
                if self.fits():
                    self._share()
            except Exception:
                log.exception("cannot look for sessions that may share a process; the next ring tries again")

    def _share(self) -> None:
        """Let sessions for which no slot is free into processes that have their base model. Raises DATABASE_AWAY."""
        for host in self.attempts():
            while isinstance(host, AttemptRunner) and host.takes_guests():
                try:
                    with self._context.database.write() as session:
                        lease, room = self._settings.lease_seconds, self._room.left()
                        claim = sharing.join(session, host.token, host.claim.slots, lease, room=room)
                except DATABASE_AWAY:
                    self.unheard = True
                    raise
                if claim is None:
                    break
                log.info("%s: attempt %d joins %s", claim.label, claim.token.attempt, host.claim.label)
                guest = host.admit(claim)
                with self._idle:
                    self._busy[claim.token.job_id] = guest
                name = f"eft-guest-{claim.token.job_id[-6:]}"
                threading.Thread(target=self._entertain, args=(guest,), name=name, daemon=True).start()

    def _entertain(self, guest: GuestAttempt) -> None:
        try:
            guest.run()
        except Exception:
            log.exception("%s: the end of attempt %d was not written", guest.claim.label, guest.token.attempt)
            self.unheard = True
        finally:
            with self._idle:
                del self._busy[guest.token.job_id]
                self._idle.notify_all()

    def _claim_for(self, slot: Slot) -> AttemptRunner | None:
        """What stands in the way of a claim is put aside, so that the next in line can have the slot."""
        for _ in range(CLAIM_TRIES):
            began = boottime()
            try:
                return self._begun(self._claimed(slot), began)
            except DATABASE_AWAY:
                self.unheard = True  # an error of the commit does not say whether it was done
                raise
            except claims.Unclaimable as error:
                log.exception("%s cannot be claimed; other jobs go first", error.job_id)
                with self._context.database.write() as session:
                    lease_expiry.postpone(session, error.job_id, node.loss_policy(self._settings))
            except Exception:  # most of all IntegrityError: the database says that the slot is taken
                log.exception("slot %s: cannot claim, though nothing runs there", slot.id)
                self._astray = True
                if not self._clear_slots():
                    return None
        return None

    def _claimed(self, slot: Slot) -> Claim | None:
        with self._context.database.write() as session:
            return claims.claim(
                session,
                self._worker,
                self._settings.node,
                slot,
                self._settings.lease_seconds,
                beside=[one for one in self._slots if one.phase == slot.phase and self._offered(one)],
                room=self._room.left(),
                half_life=self._settings.fairshare_half_life_hours * 3600.0,
                leave_seconds=self._settings.stop_grace_seconds + self._settings.gpu_clear_seconds,
            )

    def _begun(self, claim: Claim | None, began: float) -> AttemptRunner | None:
        if claim is None:
            return None
        names = ", ".join(one.id for one in claim.slots)
        log.info("%s: attempt %d (%s) on slot %s", claim.label, claim.token.attempt, claim.kind, names)
        attempt = AttemptRunner(self._context, claim, began)
        with self._idle:
            self._busy.update({one.id: attempt for one in claim.slots})
        return attempt

    def _requeue_unheard(self) -> None:
        """Nothing runs for a claim that we did not hear of, and it holds a slot: not to be left to its lease."""
        if not self.unheard:
            return
        known = {(attempt.token.job_id, attempt.token.attempt) for attempt in self.attempts()}
        with self._context.database.write() as session:
            given_back = requeue.requeue_unacknowledged(session, self._worker, known)
        self.unheard = False
        for job_id in given_back:
            log.warning("%s: returned to the queue; the database went away during its claim", job_id)

    def _clear_slots(self) -> bool:
        """Whether something held a slot here under which nothing ran, and does so no more."""
        if not self._astray:
            return False
        known = {(attempt.token.job_id, attempt.token.attempt) for attempt in self.attempts()}
        with self._context.database.write() as session:
            policy = node.loss_policy(self._settings)
            ended = lease_expiry.clear_slots(session, self._settings.node, self._worker, known, policy)
        self._astray = False
        for job_id in ended:
            log.warning("%s: its slot is free again; nothing ran there", job_id)
        return bool(ended)

    def _offered(self, slot: Slot) -> bool:
        """It is free and fit, and this worker stays."""
        return slot.id not in self._busy and not self._context.leaving.is_set() and self._fit(slot)
