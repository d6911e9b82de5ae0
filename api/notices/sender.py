"""Sends stored deliveries (core/jobs/base/deliveries.py): one API process leads, and each target has its own thread.

At least once: an attempt whose outcome could not be written is made again, with the same `webhook-id`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

from sqlalchemy.exc import SQLAlchemyError

from api.notices import queue
from api.notices.queue import DAY, Due, RetrySchedule
from api.notices.render import message, valid
from core.base.addresses import Lookup
from core.base.post import post
from core.db.engine import Database
from core.ids import new_id
from core.jobs.lifecycle import leader
from core.settings import Settings

log = logging.getLogger("eft.api.notices")

ROLE = "notices"
POLL_SECONDS = 0.5
FORGET_SECONDS = 3600.0
CLOSE_SECONDS = 2.0
AT_ONCE = 32
"""Targets that are told at the same time. A slow one takes EFT_WEBHOOK_TIMEOUT_SECONDS of one of these at most, and
then waits for its next turn."""


class Sender:
    """`lookup` stands in for the resolver in tests."""

    def __init__(self, database: Database, settings: Settings, lookup: Lookup = socket.getaddrinfo) -> None:
        self._database = database
        self._settings = settings
        self._lookup = lookup
        self._holder = new_id("api")
        self._lead_seconds = max(3.0, 2 * settings.webhook_timeout_seconds)
        self._leads_until = self._next_forget = 0.0
        self._patience = RetrySchedule(settings.webhook_retry_seconds, settings.webhook_disable_days * DAY)
        self._site = settings.public_url.rstrip("/") or f"http://{settings.host}:{settings.port}"
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Thread] = {}
        """Webhook → who tells it."""
        self._away = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Begin nothing more, and let another process lead. An attempt under way is not waited for for long: should its
        outcome not be written, it is made again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in list(self._busy.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._leads_until:
            try:
                leader.resign(self._database, ROLE, self._holder)
            except SQLAlchemyError as error:
                log.warning("the lead over notices runs out by itself: %s", error)

    def turn(self) -> int:
        """Start due deliveries that are not under way; returns their number."""
        with self._lock:
            busy = set(self._busy)
        if len(busy) >= AT_ONCE:
            return 0
        with self._database.read() as session:
            found = queue.due(session, busy, AT_ONCE - len(busy))
        if not found or not self._leads():
            return 0
        with self._database.read() as session:  # again: whoever led before may have sent some of it
            found = queue.due(session, busy, AT_ONCE - len(busy))
        for one in found:
            thread = threading.Thread(target=self._tell, args=(one,), name=f"notice {one.delivery.id}", daemon=True)
            with self._lock:
                self._busy[one.webhook.id] = thread
            thread.start()
        return len(found)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.turn()
                self._forget()
            except SQLAlchemyError as error:
                if not self._away:
                    log.error("the database does not answer, notices wait: %s", error)
                self._away = True
            except Exception:
                log.exception("notices wait for a while")
                self._stop.wait(10.0)
            else:
                self._away = False

    def _leads(self) -> bool:
        now = time.monotonic()
        if now < self._leads_until - self._lead_seconds / 2:
            return True
        won = leader.lead(self._database, ROLE, self._holder, self._lead_seconds)
        self._leads_until = now + self._lead_seconds if won else 0.0
        return won

    def _tell(self, one: Due) -> None:
        webhook, delivery = one.webhook, one.delivery
        try:
            now = time.time()
            headers, body = message(
                "chat" if webhook.kind == "chat" else "standard",
                webhook.url,
                delivery,
                valid(webhook.secrets, now),
                int(now),
                self._site,
            )
            answer = post(
                webhook.url,
                headers,
                body,
                allow=self._settings.webhook_allow,
                seconds=self._settings.webhook_timeout_seconds,
                lookup=self._lookup,
            )
            with self._database.write() as session:
                queue.settle(session, one, answer, self._patience)
            if not answer.taken:
                attempt = delivery.attempts + 1
                log.info("notice %s to %s, attempt %d: %s", delivery.id, webhook.id, attempt, answer.error)
        except Exception:
            log.exception("notice %s: what became of it is not written down; it is sent again", delivery.id)
            self._stop.wait(POLL_SECONDS)
        finally:
            with self._lock:
                self._busy.pop(webhook.id, None)

    def _forget(self) -> None:
        now = time.monotonic()
        if now < self._next_forget:
            return
        self._next_forget = now + FORGET_SECONDS
        while True:
            with self._database.write() as session:
                gone = queue.forget(session, self._settings.webhook_keep_days * DAY)
            if gone < 1000 or self._stop.is_set():
                return
