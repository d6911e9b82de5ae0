"""Keeps the leases of what runs here: the one place that renews them."""

from __future__ import annotations

import logging
import os
import signal
import threading

from core.base.clock import boottime
from core.jobs.lifecycle import claims
from core.jobs.policies import nodes
from worker.agent.claim_loop import ClaimLoop
from worker.attempt.context import DATABASE_AWAY, WorkerContext

log = logging.getLogger("eft.worker")


class Leases:
    """`run` is the heartbeat's thread. A lost node sends this process SIGTERM."""

    def __init__(self, context: WorkerContext, worker: str, running: ClaimLoop, stopped: threading.Event) -> None:
        self._context, self._settings, self._worker = context, context.settings, worker
        self._claims = running
        self._stopped = stopped

    def run(self) -> None:
        while not self._stopped.wait(self._settings.renew_seconds):
            try:
                self._renew()
            except DATABASE_AWAY as error:
                # No renewal, no heartbeat: the children end themselves before their leases do.
                log.warning("cannot renew leases, database: %s", error)
            except Exception:
                log.exception("cannot renew leases")

    def _renew(self) -> None:
        attempts = self._claims.attempts()
        lease, began = self._settings.lease_seconds, boottime()
        with self._context.database.write() as session:
            known = nodes.heartbeat(
                session, self._settings.node, self._worker
            )  # before the jobs: core/jobs/policies/nodes.py
            held = {attempt: claims.renew(session, attempt.token, lease) is not None for attempt in attempts}
        for attempt, holds in held.items():
            if not holds:
                if attempt in self._claims.attempts() and not attempt.ending:
                    log.warning("%s: the lease of attempt %d is lost", attempt.claim.label, attempt.token.attempt)
                    attempt.lose()
            else:  # a child counts from `began`, so that this process may sleep in between (a frozen machine)
                attempt.beat(began)
        if not known:
            log.critical("another worker serves node %s now; this one leaves (EFT_NODE)", self._settings.node)
            os.kill(os.getpid(), signal.SIGTERM)
