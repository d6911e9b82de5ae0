"""One claim, from its order to its end: spawn, relay, watch, stop, finish. Runs in the thread that won the claim."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from core import logfile
from core.errors import NoSpace
from core.hardware.discover import Gpu
from core.hardware.selftest import shared
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.kinds import CHILDREN, Kind
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Failed, NoRoom, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.views import curves
from core.spec.run.folder import CHECKPOINTS, LOG_FILE
from core.storage.store import StoreAway
from worker import leftovers, orders, processes
from worker.attempt import outcome
from worker.attempt.child import Child, write_order
from worker.attempt.context import DATABASE_AWAY, RETRY_SECONDS, PatientDatabase, WorkerContext
from worker.attempt.endings import NotStarted, defect, starting
from worker.attempt.event_relay import EventRelay
from worker.attempt.fork_server import ForkServer
from worker.attempt.serving_bridge import ServingBridge
from worker.attempt.sessions.bridge import SessionBridge
from worker.attempt.sessions.guest import GuestAttempt
from worker.attempt.sessions.guests import Guests
from worker.attempt.sessions.line import SessionLine, of_shared
from worker.attempt.time_limit import TimeLimit
from worker.attempt.tracking import Trackers
from worker.environment import child_environment
from worker.gpus import gpu_memory
from worker.store.publisher import Publisher, persist, publish_prepared
from worker.store.staging import Staging

log = logging.getLogger("eft.worker")

LAST_WORDS = 1 << 14
"""Bytes of a log in which a library says why it gave up; the stacks of threads may follow."""
DUMP_SECONDS = 2.0
"""For a child that is about to be killed to write its stacks."""
COLD_SECONDS = 0.5
"""What the start of a child that imports no torch takes: it waits no longer for a fork server."""
CURVES_SECONDS = 60.0
"""Between two looks at whether curves have grown long."""


class AttemptRunner:
    """`lost` and `child` may be looked at, and `lose` called, from other threads."""

    def __init__(self, site: WorkerContext, claim: Claim, held_at: float) -> None:
        """`held_at`: seconds of CLOCK_BOOTTIME before which the lease was not counted yet."""
        self.site = site
        self.claim = claim
        self.token = claim.token
        self.folder = site.layout.attempt(claim.token.job_id, claim.token.attempt)
        self.child: Child | None = None
        self.lost = threading.Event()
        """Somebody else may have the job: nothing may be written any more, and nothing of it may run."""
        self.ending = False
        """Nothing of it runs any more, and its end is about to be written, or is: the lease goes with that."""
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._held_at = held_at
        self._asked: str | None = None
        self._deadline: float | None = None
        self._events = EventRelay(site, claim, self.folder)
        self._database = PatientDatabase(site.database, self._gives_up)
        self._hung: str | None = None
        self._limit = TimeLimit(claim)
        self._time_is_up = False
        """Whether its time limit is the only reason for its stop."""
        self._trackers = Trackers(site, claim, self.folder)
        self._curves_at = self.began + CURVES_SECONDS
        self._bridge: SessionBridge | ServingBridge | None = None
        self._guests = Guests(site)
        self._stage = None if site.copies is None else Staging(site.copies, claim)

    def run(self) -> None:
        """Never raises for what a job or the box does wrong: that becomes the job's outcome. Where not even that can be
        written it raises, and nothing of the attempt runs any more."""
        try:
            end = self._attend()
            self.ending = True
            self._guests.see_out(*(end or (Requeued("the process it shared has ended"), None)))
            if end is not None:
                self._finish(*end)
                self._keep_curves()
        finally:
            if self.child is not None:
                self.child.reap()
            self._guests.see_out(defect(RuntimeError()), None)
            self._trackers.end(None)
            if self._bridge is not None:
                self._bridge.close()
            if self._events.publisher is not None:
                self._events.publisher.close()
            if self._stage is not None:
                self._stage.close()

    def _attend(self) -> tuple[Outcome, int | None] | None:
        """What is to be written, with the child's exit status; None: it is left to its lease.

        The last net: a defect of ours, or a model that nobody has thought of, must not take the worker's thread, nor
        leave a child behind, nor keep the slot.
        """
        try:
            return self._work()
        except NotStarted as reason:
            return reason.outcome, None
        except Exception as error:
            log.exception("attempt %d of %s", self.token.attempt, self.token.job_id)
            code = None if self.child is None else self.child.reap()
            return defect(error), code

    def _work(self) -> tuple[Outcome, int | None] | None:
        out_of_memory_before = processes.oom_kills()
        memory_before = gpu_memory.used_by_each(self._gpus, self.site.settings.sysfs)
        self._events.catch_up(self._database)
        self._spawn()
        self._watch()
        assert self.child is not None
        code = self.child.reap()
        if self._bridge is not None:
            self._bridge.close()
        leftovers.clear(self.folder)
        if (quarantine := self.site.quarantine) is not None:
            quarantine.hold_uncleared(self._gpus, memory_before, self.site.settings.gpu_clear_seconds)
        killed = (processes.oom_kills() or 0) > (out_of_memory_before or 0)
        try:
            self._database.persist(self._events.tell_rest)
        except Exception as error:
            log.exception("events of attempt %d of %s", self.token.attempt, self.token.job_id)
            return Failed("internal", "bad_events", f"its events cannot be read: {type(error).__name__}"), code
        result = outcome.read(
            code,
            self._events.last,
            asked=self._asked,
            out_of_memory=killed,
            hung=self._hung,
            batch_helps=self.claim.slot.kind == "cpu" and self._events.signs.phase == "training",
            last_words=self._last_words() if code < 0 else "",
        )
        if self._time_is_up and isinstance(result, Requeued):
            result = self._limit.failure()
        elif not self._guests.gone():
            result = of_shared(result)
        if self.claim.kind == Kind.PREPARE and isinstance(result, Succeeded):
            weights = self.claim.slot.kind != "preview"
            found = orders.with_shape(result.result, weights=weights)
            result = replace(result, result=orders.portable(found, self.site.layout))
        self._settle_snapshots(result)
        try:
            published = self._publish(result)
        except Exception as error:
            log.exception("results of attempt %d of %s", self.token.attempt, self.token.job_id)
            words = f"its results cannot be copied to the data root: {type(error).__name__}: {error}"
            return Failed("machine", "worker_error", words), code
        if published:
            return result, code
        log.warning("%s: its results are not complete in the data root; left to its lease", self.claim.label)
        return None

    def _settle_snapshots(self, result: Outcome) -> None:
        """What a trainer has left in memory: onto the disk, if it is further than its checkpoints there."""
        snapshots, job_id = self.site.snapshots, self.token.job_id
        if snapshots is None or self.claim.kind != Kind.TRAIN:
            return
        if self.lost.is_set():
            snapshots.forget(job_id, self.token.attempt)  # this box may be at the next one already
        elif isinstance(result, Succeeded):
            snapshots.forget(job_id)
        elif (name := snapshots.bring_down(job_id, self.folder)) is not None and self._events.publisher is not None:
            self._events.publisher.checkpoint(f"{CHECKPOINTS}/{name}")

    def _last_words(self) -> str:
        """The end of its log."""
        try:
            with (self.folder / LOG_FILE).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
                return file.read(LAST_WORDS).decode(errors="replace")
        except OSError:
            return ""

    @property
    def stepped(self) -> bool:
        """Whether its trainer has done a step."""
        return self._events.stepped

    def lose(self) -> None:
        """The lease is gone: end the child at once."""
        self.lost.set()
        with self._lock:
            if self.child is not None:
                self.child.kill()

    def hurry(self) -> None:
        """The worker is leaving: the child is to checkpoint and go."""
        self._ask(StopReason.LEAVING)

    def beat(self, held_at: float) -> None:
        """The lease was renewed, not before `held_at`."""
        with self._lock:
            self._held_at = held_at
            if self.child is not None and not self.lost.is_set():
                self.child.beat(held_at)

    # -- the parts of run, in their order

    def _spawn(self) -> None:
        settings, layout, slots = self.site.settings, self.site.layout, self.claim.slots
        kind = CHILDREN[self.claim.kind]
        if self._limit.used_up:
            raise NotStarted(self._limit.failure())
        gpus, verdict = self._gpus, None
        if (selftests := self.site.selftests) is not None:
            verdict = shared([known for slot in slots if (known := selftests.verdict(slot.id)) is not None])
        with starting(self.claim):
            self._bring()
            if (forks := self._forks()) is not None:  # before the order, whose fence counts from now
                forks.await_ready(self._leaves, COLD_SECONDS if kind.network else math.inf)
            order = orders.order_of(self.claim, settings, layout, self._held_at, verdict, self.site.snapshots)
            write_order(self.folder, order)
            environment = child_environment(
                self.claim.kind,
                gpu=gpus[0] if gpus else None,
                beside=gpus[1:],
                threads=self.site.threads,
                root=layout.root,
                cure=None if verdict is None else verdict.environment,
            )
            with self._lock:
                if self.lost.is_set() or self.site.leaving.is_set():
                    raise NotStarted(Requeued(StopReason.LEAVING.message(self.site.node)))
                # The child of several ranks is their launcher, which on GPUs imports nothing that a spare has imported.
                if kind.standby and self.site.spares is not None and len(slots) == 1:
                    self.child = self.site.spares.take(self.folder, environment)
                if kind.stream:
                    self.child = self._bridged(kind.module, environment)
                if self.child is None:
                    self.child = self._start(kind.module, environment)
        if self.site.copies is not None:
            bucket, key = self.site.copies.bucket, str(self.folder.relative_to(layout.root))
            keep = self.claim.spec["checkpoint"].get("keep_last", 2)
            self._events.publisher = Publisher(bucket, self.folder, key, keep, self.lost)
        pid, started = self.child.pid, self.child.started
        if self._database.write(lambda session: claims.started(session, self.token, pid, started)) is False:
            self.lose()
        self._trackers.start()
        if self._bridge is not None:
            self._bridge.start()

    def _forks(self) -> ForkServer | None:
        """What forks children on a box without GPUs."""
        return None if self._gpus else self.site.forks

    def _leaves(self, seconds: float) -> bool:
        return self.lost.is_set() or self.site.leaving.wait(seconds)

    def _start(self, module: str, environment: Mapping[str, str], stream: socket.socket | None = None) -> Child:
        forks = self._forks()
        forked = None if forks is None else forks.fork(self.folder, module, environment, stream)
        return Child(self.folder, module, environment, stream) if forked is None else forked

    def _bridged(self, module: str, environment: Mapping[str, str]) -> Child:
        """A child that operations are passed on to over a socket pair."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = self._start(module, environment, theirs)
        except BaseException:
            ours.close()
            raise
        site, token = self.site, self.token
        if self.claim.kind == Kind.SERVING:
            self._bridge = ServingBridge(site, self._database, token, ours, self.lose, self._ask)
        else:
            line = SessionLine(ours)
            folder, bells = site.layout.session(token.job_id), site.layout.bells
            self._bridge = SessionBridge(
                self._database,
                token,
                folder,
                bells,
                line,
                self.lose,
                alone=self._guests.gone,
                ready=lambda: self._guests.open(line, child),
            )
        return child

    # -- other sessions in the process of this one

    def takes_guests(self) -> bool:
        """Whether another session may join."""
        leaves = self._asked is not None or self.lost.is_set() or self.site.leaving.is_set()
        return not leaves and not self._limit and len(self.claim.slots) == 1 and self._guests.room()

    def admit(self, claim: Claim) -> GuestAttempt:
        """Let a session in for which `takes_guests` has room. The caller runs it, in a thread of its own."""
        return self._guests.admit(claim)

    # -- a data root that is an object store

    def _bring(self) -> None:
        """What the child needs onto this box. A store that is away is waited for, as a database is."""
        told = False
        while self._stage is not None:
            try:
                self._stage.bring(self.site.database, self._halted)
                return
            except NoSpace as error:
                raise NotStarted(NoRoom(error.message, error.needs_bytes)) from error
            except (StoreAway, *DATABASE_AWAY) as error:
                if not told:
                    log.warning("%s: %s; trying again", self.claim.label, error)
                    told = True
                if self._gives_up(RETRY_SECONDS):
                    raise NotStarted(Requeued(f"the data root cannot be reached from {self.site.node}")) from error

    def _halted(self) -> None:
        """Raises NotStarted once the files being copied are no longer needed."""
        if self.lost.is_set() or self.site.leaving.is_set():
            raise NotStarted(Requeued(StopReason.LEAVING.message(self.site.node)))
        with self.site.database.read() as session:
            stop = claims.stop_requested(session, self.token)
        if stop is None or stop:
            raise NotStarted(Requeued("it was asked to stop while its data was copied"))

    def _publish(self, result: Outcome) -> bool:
        """Before the outcome is written: whoever reads it finds what it tells of. False: this worker had to end first,
        or has lost the job."""
        if self.site.copies is None or self._events.publisher is None:
            return True
        bucket, root = self.site.copies.bucket, self.site.layout.root
        done = True
        if self.claim.kind == Kind.PREPARE and isinstance(result, Succeeded):
            done = persist(lambda: publish_prepared(bucket, root, result.result), self._gives_up)
        artifacts = result.artifacts if isinstance(result, Succeeded) else ()
        return self._events.publisher.finish(artifacts, not isinstance(result, Succeeded), self._gives_up) and done

    def _gives_up(self, seconds: float) -> bool:
        return self.lost.is_set() or self.site.abandon.wait(seconds)

    def _watch(self) -> None:
        """Until the child has ended: tell its events, pass on a wish to stop, and kill it when its grace is over."""
        child = self.child
        assert child is not None
        while not child.exited(self.site.settings.relay_seconds):
            try:
                stop = self._events.tell()
            except DATABASE_AWAY as error:
                # Nothing to do but wait: without a renewed lease there is no heartbeat, and the child ends itself.
                log.warning("database: %s", error)
                continue
            self._bound_log()
            self._trackers.look()
            if time.monotonic() > self._curves_at:
                self._keep_curves()
            if stop is None:
                log.warning("attempt %d of %s is lost", self.token.attempt, self.claim.label)
                self.lose()
            elif stop:
                self._ask(StopReason(stop))
            elif self.site.leaving.is_set():
                self.hurry()
            elif self._asked is None and self._limit.reached(self.site.settings.stop_grace_seconds):
                self._time_is_up = True
                self._ask(StopReason.MAX_RUNTIME)
            if self._deadline is not None and time.monotonic() > self._deadline:
                log.warning("%s did not leave within its grace; killed", self.claim.label)
                self._deadline = None
                self._dump_and_kill(child)
            elif self._hung is None and (words := self._events.signs.hung()) is not None:
                log.error("%s: %s; killed", self.claim.label, words)
                self._hung = words
                self._dump_and_kill(child)

    def _bound_log(self) -> None:
        """Whatever its trainer prints (core/logfile.py)."""
        try:
            logfile.bound(self.folder / LOG_FILE, self.site.settings.run_log_bytes)
        except OSError as error:
            log.warning("the log of %s cannot be kept short: %s", self.claim.label, error)

    def _dump_and_kill(self, child: Child) -> None:
        child.dump()
        if not child.exited(DUMP_SECONDS):
            child.kill()

    @property
    def _gpus(self) -> list[Gpu]:
        """The GPUs of its slots, in their order; empty on a CPU."""
        return [gpu for slot in self.claim.slots if (gpu := self.site.gpus.get(slot.id)) is not None]

    def _ask(self, why: StopReason) -> None:
        with self._lock:
            if self.child is not None and self._asked is None:
                self._asked = why.message(self.site.node, [slot.id for slot in self.claim.slots])
                self._deadline = time.monotonic() + self.site.settings.stop_grace_seconds
                self.child.ask()

    def _finish(self, result: Outcome, code: int | None) -> None:
        try:
            after = self._write_end(result, code)
        except Exception as error:
            log.exception("the end of attempt %d of %s", self.token.attempt, self.token.job_id)
            result = defect(error)
            after = self._write_end(result, code)
        words = result.kind if isinstance(result, Succeeded) else str(result)
        self._trackers.end(after)
        log.info("attempt %d of %s: %s → %s", self.token.attempt, self.claim.label, words, after or "lost")

    def _keep_curves(self) -> None:
        """Thin long curves out for those who look at them later. A service to them: it may fail."""
        began = time.monotonic()
        try:
            curves.prepare(self.site.database, self.site.layout, self.token.job_id)
        except Exception:
            log.exception("curves of %s", self.token.job_id)
        now = time.monotonic()
        self._curves_at = now + max(CURVES_SECONDS, 20 * (now - began))

    def _write_end(self, result: Outcome, code: int | None) -> Status | None:
        settings = self.site.settings
        backoff = settings.retry_backoff_seconds
        policy = RetryPolicy(
            settings.max_machine_failures,
            backoff,
            no_room_seconds=6 * backoff,
            memory_check=settings.memory_check,
        )
        return self._database.write(lambda session: finish(session, self.token, self.claim.kind, result, code, policy))
