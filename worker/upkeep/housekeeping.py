"""What one worker does for the whole installation while it leads: ring the bell, take back expired leases."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import InterfaceError, OperationalError

from core import caches
from core.db.engine import Database
from core.db.tables import Job
from core.jobs.admission import dependencies
from core.jobs.base import outbox
from core.jobs.housekeeping import forget_answers, unknown_files
from core.jobs.lifecycle import claims, leader, lease_expiry, retention
from core.jobs.lifecycle.pipelines import advance
from core.jobs.lifecycle.registry import entries
from core.jobs.lifecycle.serving import requests
from core.jobs.lifecycle.sessions import idle, saves
from core.jobs.lifecycle.sessions import log as session_log
from core.jobs.lifecycle.sweeps import advance as sweeps
from core.jobs.policies import maintenance, nodes, usage
from core.jobs.policies.budget import Budget
from core.jobs.policies.volume import VolumeLimits
from core.jobs.scheduling import preempt
from core.settings import Settings
from core.storage.bucket import Bucket
from core.storage.layout import Layout
from core.storage.open import open_store
from worker import leftovers
from worker.preflight.node import loss_policy
from worker.store import objects
from worker.upkeep import disk_usage, reclaim
from worker.upkeep.disk_room import room_on

log = logging.getLogger("eft.housekeeping")

ROLE = "housekeeping"
RELAY_SECONDS = 0.25
PIPELINE_SECONDS = 1.0
CLEAR_SECONDS = 600.0
BUDGET_SECONDS = 30.0
"""How often the data root is held against its budgets, at the most."""
COLLECT_SECONDS = 86_400.0
BOOKS = 500
"""Rows charged in one transaction."""
ORPHAN_SECONDS = 24 * 3600.0


def remove_orphans(database: Database, layout: Layout, older_than: float = ORPHAN_SECONDS) -> list[str]:
    """Delete stored files and uploaded models that no row names: their process ended between the rename and the row,
    or between the end of a row and that of its bytes. What is younger may get its row yet. Returns their ids."""
    now, old = time.time(), []
    for path in layout.files.glob("file-" + 26 * "[0-9a-z]"):
        try:
            seen = path.lstat()
        except FileNotFoundError:
            continue  # deleted by its owner meanwhile
        if now - max(seen.st_mtime, seen.st_ctime) > older_than:
            old.append(path.name)
    uploaded = [one for one in layout.runs.glob("upload-" + 26 * "[0-9a-z]") if now - one.lstat().st_mtime > older_than]
    with database.read() as session:
        orphans = unknown_files(session, old)
        models = unknown_files(session, [path.name for path in uploaded], Job)
    for name in orphans:
        layout.file(name).unlink(missing_ok=True)
    for name in models:
        shutil.rmtree(layout.job(name))
    return [*orphans, *models]


class BrokerAway(Exception):
    """The bell cannot be rung now; what was to be said stays in the outbox."""


class Housekeeper:
    """`publish` sends one wake-up with a job's id as a hint, `backlog` counts those that no worker has taken yet.

    Both may raise BrokerAway.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        holder: str,
        publish: Callable[[str], None],
        backlog: Callable[[], int],
    ) -> None:
        self._database = database
        self._settings = settings
        self._holder = holder
        self._publish = publish
        self._backlog = backlog
        self._stopped = threading.Event()
        self._layout = Layout(settings.root)
        store = open_store(settings)
        self._bucket = store if isinstance(store, Bucket) else None
        self._next_budgets = 0.0
        self._lead_seconds = max(3 * settings.sweep_seconds, 10.0)
        self._away: set[str] = set()
        """Names what cannot be reached; logged once an outage."""

    def run(self) -> None:
        leads_until = next_lead = next_sweep = next_clear = next_pipelines = 0.0
        next_collect = time.monotonic() + CLEAR_SECONDS  # not in the first minutes, when everything begins again
        while not self._stopped.wait(RELAY_SECONDS):
            now = time.monotonic()
            if now >= next_lead:
                next_lead = now + self._lead_seconds / 3
                leads = self._guarded("database", self._lead)
                leads_until = now + self._lead_seconds if leads else 0.0
            if now >= leads_until:
                continue
            if now >= next_sweep:
                next_sweep = now + self._settings.sweep_seconds
                self._guarded("database", self._reap)
                self._guarded("database", self._keep_books)
                self._guarded("broker", self._wake)
                self._guarded("database", self._forget_requests)
            if now >= next_clear:
                next_clear = now + CLEAR_SECONDS
                self._guarded("database", self._clear)
            if now >= next_collect:
                next_collect = now + COLLECT_SECONDS
                self._guarded("database", self._collect)
            if now >= self._next_budgets and Budget.of(self._settings).limits:
                self._next_budgets = now + BUDGET_SECONDS
                self._guarded("database", self._keep_budgets)
            if now >= next_pipelines:
                next_pipelines = now + PIPELINE_SECONDS
                self._guarded("database", self._advance_pipelines)
            self._guarded("broker", self._relay)

    def stop(self) -> None:
        """Let the next worker lead at once."""
        self._stopped.set()
        self._guarded("database", self._resign)

    def _lead(self) -> bool:
        return leader.lead(self._database, ROLE, self._holder, self._lead_seconds)

    def _resign(self) -> bool:
        leader.resign(self._database, ROLE, self._holder)
        return True

    def _reap(self) -> bool:
        with self._database.write() as session:
            taken = lease_expiry.reap(session, loss_policy(self._settings))
        for job_id, attempt in taken:
            log.warning("%s: taken back; its worker was silent for longer than its lease", job_id)
            leftovers.clear(self._layout.attempt(job_id, attempt))  # its trainer has ended itself before
        return True

    def _collect(self) -> bool:
        """What the rules of retention let go (core/jobs/lifecycle/retention.py)."""
        retention.sweep(self._layout)
        with self._database.write() as session:
            entries.reconcile(session)
        with self._database.read() as session:
            found = list(retention.find(session, self._layout, retention.RetentionRules.of(self._settings)))
        for one in found:
            if self._stopped.is_set():
                break
            if retention.remove(self._database, self._layout, None, one):
                log.info("removed: %s of %s (%d MiB), since %s", one.kind, one.id, one.bytes >> 20, one.why)
        if self._bucket is not None:
            freed = objects.collect(self._database, self._bucket, retention.RetentionRules.of(self._settings))
            log.info("removed from %s: %d MiB of runs that ended long ago", self._bucket.where, freed >> 20)
        return True

    def _advance_pipelines(self) -> bool:
        """Submit the steps whose turn it is, and let jobs go that waited for others. Another process may safely do the
        same at once."""
        with self._database.read() as session:
            waiting = advance.due(session)
            after, swept = dependencies.due(session), sweeps.due(session)
        for job_id in after:
            with self._database.write() as session:
                dependencies.settle(session, job_id)
        for sweep_id in swept:
            sweeps.advance(self._database, sweep_id)
        for pipeline_id in waiting:
            if self._stopped.is_set():
                break
            advance.advance(self._database, pipeline_id, VolumeLimits.of(self._settings))
        return True

    def _keep_books(self) -> bool:
        """Charge what slots were held for, let begin what was planned, and ask for room for higher priorities."""
        with self._database.read() as session:
            charge, maintain, preempted = usage.due(session), maintenance.begins(session), preempt.possible(session)
        while charge:
            with self._database.write() as session:
                count = usage.charge(session, self._settings.fairshare_half_life_hours * 3600.0, BOOKS)
            charge = count == BOOKS
        if preempted:
            for one in self._preempt():
                log.warning("%s has a higher priority: %s make room", one.waiting, ", ".join(one.victims))
        if maintain:
            with self._database.write() as session:
                asked = maintenance.begin(session)
            if asked:
                log.warning("maintenance begins: %d job(s) write a checkpoint and leave", asked)
        return True

    def _preempt(self) -> list[preempt.Preemption]:
        rules = preempt.PreemptionSettings.of(self._settings, room_on(self._settings, self._database))
        with self._database.write() as session:
            return preempt.ask(session, rules)

    def _forget_requests(self) -> bool:
        """Those whose callers have gone without a word: an API process was killed."""
        with self._database.read() as session:
            old = requests.has_old(session)
        if old:
            with self._database.write() as session:
                log.info(
                    "dropped %d request(s) to served models that no client waits for", requests.forget_old(session)
                )
        return True

    def _clear(self) -> bool:
        gone, limit = 0, 1000
        while True:
            with self._database.write() as session:
                count = forget_answers(session, self._settings.idempotency_hours, limit)
            gone += count
            if count < limit:
                break
        if gone:
            log.info("forgot %d answer(s) to Idempotency-Keys", gone)
        self._close_unused()
        if (hours := self._settings.session_result_hours) and (
            count := session_log.forget_results(self._database, self._layout, hours)
        ):
            log.info("removed %d result(s) of sessions after %g hours", count, hours)
        if count := session_log.forget_ended(self._database, self._layout):
            log.info("removed the tensors of operations of %d session(s) that have ended", count)
        if folders := saves.sweep(self._database, self._layout):
            log.info("removed %d folder(s) that sessions had saved and that have gone", folders)
        if removed := remove_orphans(self._database, self._layout):
            log.warning("removed %d file(s) that were stored, not registered: %s", len(removed), ", ".join(removed))
        self._shrink_cache()
        if self._bucket is not None:
            if removed := objects.remove_orphans(self._database, self._bucket):
                log.warning("removed from %s, not in the database: %s", self._bucket.where, ", ".join(removed))
            objects.measure(self._database, self._bucket)
        elif not Budget.of(self._settings).limits:
            disk_usage.measure(self._database, self._layout)
        return True

    def _close_unused(self) -> None:
        if hours := self._settings.unused_session_hours:
            with self._database.write() as session:
                closed = idle.close_unused(session, hours)
            if closed:
                log.info("closed sessions without an operation for %g hours: %s", hours, ", ".join(closed))

    def _keep_budgets(self) -> bool:
        if self._bucket is not None:
            return True  # a bucket has its own limits; what it holds is measured with the rest
        began = time.monotonic()
        reclaim.reclaim(self._database, self._layout, self._settings, self._stopped.is_set)
        # Looking at every file again takes its time on a large data root: at most a twentieth of ours.
        self._next_budgets = time.monotonic() + max(BUDGET_SECONDS, 20 * (time.monotonic() - began))
        return True

    def _shrink_cache(self) -> None:
        if not self._settings.cache_bytes:
            return
        try:
            gone = caches.make_room(self._layout.cache, self._settings.cache_bytes)
        except OSError as error:
            log.warning("the cache cannot be brought below EFT_CACHE_BYTES: %s", error)
            return
        if gone:
            size = sum(entry.bytes for entry in gone)
            log.info("removed %d entries of %d MiB from the cache (EFT_CACHE_BYTES)", len(gone), size >> 20)

    def _wake(self) -> bool:
        """A lost message is made good here. One ring a node, and none while earlier ones still wait to be heard."""
        room = room_on(self._settings, self._database)
        with self._database.read() as session:
            job_id = claims.runnable(session, room=room)
            alive = nodes.alive(session, self._settings.lease_seconds)
        if job_id is not None and self._backlog() == 0:
            for _ in range(max(1, alive)):
                self._publish(job_id)
        return True

    def _relay(self) -> bool:
        outbox.relay(self._database, self._publish)
        return True

    def _guarded(self, what: str, action: Callable[[], bool]) -> bool:
        """False when the action failed. It is done again at its next turn, so nothing is lost."""
        try:
            done = action()
        except (OperationalError, InterfaceError) as error:
            self._tell("database", error)
            return False
        except BrokerAway as error:
            self._tell("broker", error)
            return False
        except Exception:
            log.exception("housekeeping")
            return False
        if what in self._away:
            self._away.discard(what)
            log.warning("%s: back", what)
        return done

    def _tell(self, what: str, error: Exception) -> None:
        if what not in self._away:
            self._away.add(what)
            log.error("%s cannot be reached, trying again: %s", what, error)
