"""Sends the trace of every job that has ended to a collector (EFT_OTLP_ENDPOINT); one API process leads.

At least once: `jobs.traced_at` is written after the collector took a trace, and a trace that is sent twice has the same
ids. A collector that is away costs nothing: jobs of the last day are sent when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import httpx
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.otlp.encode import request
from core.db.engine import Database
from core.db.tables import Job, Project, User
from core.ids import new_id
from core.jobs.base.states import Status
from core.jobs.kinds import Kind
from core.jobs.lifecycle import leader
from core.jobs.views.trace import spans
from core.settings import Settings

log = logging.getLogger("eft.api.otlp")

ROLE = "otlp"
TRACED = (Kind.TRAIN.value, Kind.EXPORT.value)
POLL_SECONDS = 5.0
LEAD_SECONDS = 60.0
AWAY_SECONDS = 30.0
"""Between two attempts at a collector that does not take anything."""
DAY = 86400.0
AT_ONCE = 20
TIMEOUT_SECONDS = 10.0
RETRY = frozenset({408, 429, 502, 503, 504})
"""Answers after which the same trace may be taken later (OTLP/HTTP, "Retryable Response Codes", and 408)."""


class Away(Exception):
    """The collector took nothing, and may later."""


class TraceExporter:
    """One thread; it does nothing where no collector is set."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._url = settings.otlp_endpoint.rstrip("/") + "/v1/traces" if settings.otlp_endpoint else ""
        self._headers = dict(part.split("=", 1) for part in settings.otlp_headers)
        self._holder = new_id("api")
        self._led = False
        self._words = ""
        """What was logged last of a collector or a database that is away, once."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        if self._url:
            self._thread.start()

    def close(self) -> None:
        """Begin nothing more, and let another process lead."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_SECONDS + 1.0)
        if self._led:
            try:
                leader.resign(self._database, ROLE, self._holder)
            except SQLAlchemyError as error:
                log.warning("the lead over traces runs out by itself: %s", error)

    def turn(self) -> int:
        """Send what has ended; returns the number of traces that the collector has now. Raises Away."""
        with self._database.read() as session:
            found = _ended(session)
        if not found:
            return 0
        self._led = leader.lead(self._database, ROLE, self._holder, LEAD_SECONDS)
        if not self._led:
            return 0
        with httpx.Client(headers=self._headers, timeout=TIMEOUT_SECONDS) as client:
            for job_id in found:
                if self._stop.is_set():
                    break
                self._send(client, job_id)
        return len(found)

    def _send(self, client: httpx.Client, job_id: str) -> None:
        with self._database.read() as session:
            job = session.get(Job, job_id)
            if job is None or job.traced_at is not None:
                return  # deleted meanwhile, or another process led before and sent it
            document = _document(session, job)
        try:
            reply = client.post(self._url, json=document)
        except httpx.HTTPError as error:
            raise Away(f"{type(error).__name__}: {error}") from None
        if reply.status_code in RETRY:
            raise Away(f"it answered {reply.status_code}")
        if not reply.is_success:
            log.error(
                "the collector at EFT_OTLP_ENDPOINT refused the trace of %s for good: %d %s",
                job_id,
                reply.status_code,
                reply.text[:500],
            )
        with self._database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(traced_at=time.time()))

    def _run(self) -> None:
        while not self._stop.wait(AWAY_SECONDS if self._words else POLL_SECONDS):
            try:
                self.turn()
            except (Away, SQLAlchemyError) as error:
                words = "the collector at EFT_OTLP_ENDPOINT" if isinstance(error, Away) else "the database"
                if not self._words:
                    log.warning("%s takes nothing, traces of jobs wait: %s", words, error)
                self._words = words
            except Exception:
                log.exception("traces of jobs wait for a while")
                self._words = "a defect"
            else:
                if self._words:
                    log.info("traces of jobs are sent again")
                self._words = ""


def _ended(session: Session) -> list[str]:
    """Jobs that ended within a day and whose trace the collector does not have, the oldest first."""
    query = select(Job.id).where(
        Job.finished_at.is_not(None), Job.traced_at.is_(None), Job.finished_at > time.time() - DAY, Job.kind.in_(TRACED)
    )
    return list(session.execute(query.order_by(Job.finished_at, Job.id).limit(AT_ONCE)).scalars())


def _document(session: Session, job: Job) -> dict[str, Any]:
    found, _ = spans(session, job, time.time(), steps=False)
    owner, project = session.get_one(User, job.owner_id).name, session.get_one(Project, job.project_id).name
    spec = job.spec
    about = {
        "eft.job.id": job.id,
        "eft.job.kind": job.kind,
        "eft.job.status": job.status,
        "eft.owner": owner,
        "eft.project": project,
        "eft.attempts": job.attempt,
        "eft.node": job.node,
        "eft.stage": (spec.get("stage") or {}).get("type"),
        "eft.method": (spec.get("method") or {}).get("type"),
        "eft.resources.gpus": (spec.get("resources") or {}).get("gpus"),
    }
    failed = (job.failure or {}).get("message", "") if job.status == Status.FAILED else None
    return request(job.id, job.name or job.id, job.created_at, about, failed, found)
