"""Between requests in the database and the child that answers them: requests go in, and pieces of answers come out as
they are made. It also looks whether a job needs the slot, or nobody the child."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Token
from core.jobs.lifecycle.serving import requests
from core.jobs.scheduling import preempt, runtime_estimates
from core.spec.run.frames import Frame, FrameError, receive, send
from worker.attempt.context import PatientDatabase, WorkerContext

log = logging.getLogger("eft.worker")

POLL_SECONDS = 0.02
"""Between two looks for requests and pieces while something is under way, and right after."""
SLOW_POLL_SECONDS = 0.1
QUICK_SECONDS = 10.0
LOOK_SECONDS = 0.4
"""Between two looks for jobs that need the slot, and for callers that have gone."""
YIELD_SECONDS = 2.0
"""A serving that was not asked for so long leaves its slot to another one."""


class ServingBridge:
    """Feeds the serving child, in threads of its own. `lose` is called when another attempt has the serving, `ask` to
    have the child leave."""

    def __init__(
        self,
        site: WorkerContext,
        patient: PatientDatabase,
        token: Token,
        stream: socket.socket,
        lose: Callable[[], None],
        ask: Callable[[StopReason], None],
    ) -> None:
        self._site, self._settings, self._patient = site, site.settings, patient
        self._token, self._stream, self._lose, self._ask = token, stream, lose, ask
        self._under_way: set[str] = set()
        self._said: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ready = threading.Event()
        self._ended = threading.Event()
        name = f"eft-serving-{token.job_id[-6:]}"
        self._reader = threading.Thread(target=self._read, name=f"{name}-read", daemon=True)
        self._writer = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def close(self) -> None:
        """End it; the child has ended, or is about to be."""
        self._ended.set()
        self._news.set()
        with contextlib.suppress(OSError):  # the other end is gone already
            self._stream.shutdown(socket.SHUT_RDWR)
        self._reader.join(30.0)
        self._writer.join(30.0)
        self._stream.close()

    def _read(self) -> None:
        """Collect what the child says."""
        try:
            while (frame := receive(self._stream)) is not None:
                header = frame.header
                if "ready" in header:
                    self._ready.set()
                else:
                    number = header.pop("id")
                    with self._lock:
                        self._said.setdefault(number, []).append(header)
                self._news.set()
        except (FrameError, OSError) as error:
            if not self._ended.is_set():
                log.warning("%s: its child is gone: %s", self._token.job_id, error)
        finally:
            self._ended.set()
            self._news.set()

    def _run(self) -> None:
        try:
            while not self._ready.is_set():
                if self._ended.is_set():
                    return  # the child has ended before it was ready: its exit status says why
                self._news.wait()
                self._news.clear()
            self._patient.write(lambda session: runtime_estimates.began(session, self._token))
            self._feed()
        except OSError as error:
            if not self._ended.is_set():
                log.warning("%s: its child is gone: %s", self._token.job_id, error)
        except Exception:
            log.exception("%s: its requests cannot be passed on", self._token.job_id)
            self._lose()

    def _feed(self) -> None:
        looked = time.monotonic()
        # One that was brought back to nobody, after a restart of its worker, leaves soon.
        used = looked - max(0.0, self._settings.serving_idle_seconds - QUICK_SECONDS)
        while not self._ended.is_set():
            if self._pass_on() or self._under_way:
                used = time.monotonic()
            self._write_down()
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS:
                looked = now
                self._cancel_gone()
                if self._leaves(now - used):
                    return self._last_words()
            self._news.wait(POLL_SECONDS if now - used < QUICK_SECONDS else SLOW_POLL_SECONDS)
            self._news.clear()
            if self._under_way:
                self._ended.wait(POLL_SECONDS)  # what comes meanwhile is written at once
        self._write_down()
        return None

    def _pass_on(self) -> bool:
        """Give the child what has come; whether something has."""
        rows = self._patient.read(lambda session: requests.due(session, self._token))
        if not rows:
            return False
        found = {row.id: row.request for row in rows}
        mine = self._patient.write(lambda session: requests.take(session, self._token, list(found)))
        root = self._settings.root
        for number in mine or ():
            request = found[number]
            if request["adapter"] is not None:
                folder = str(Path(root) / request["adapter"]["folder"])
                request = request | {"adapter": request["adapter"] | {"folder": folder}}
            self._under_way.add(number)
            send(self._stream, Frame({"id": number, "request": request}))
        return True

    def _write_down(self) -> None:
        with self._lock:
            said, self._said = self._said, {}
        if not said:
            return
        written = self._patient.write(lambda session: requests.tell(session, self._token, said))
        if written is False:
            self._lose()
            self._ended.set()
        for number, frames in said.items():
            if any("done" in frame or "error" in frame for frame in frames):
                self._under_way.discard(number)

    def _cancel_gone(self) -> None:
        if not self._under_way:
            return
        asked = list(self._under_way)
        for number in self._patient.read(lambda session: requests.gone(session, asked)) or ():
            self._under_way.discard(number)
            send(self._stream, Frame({"cancel": number}))

    def _leaves(self, idle: float) -> bool:
        """Whether the child is to leave its slot: to a job, to another serving, or since nobody asks it."""
        if self._patient.read(preempt.possible):
            for one in self._make_room():
                log.warning("%s has a higher priority: %s make room", one.waiting, ", ".join(one.victims))
                if self._token.job_id in one.victims:
                    self._ask(StopReason.PREEMPT)
                    return True
        if self._under_way:
            return False
        limit = self._settings.serving_idle_seconds
        words = f"nothing was asked for {limit:g} s; the next request brings it back"
        if idle > YIELD_SECONDS and self._patient.read(lambda session: requests.others_wait(session, self._token)):
            limit, words = YIELD_SECONDS, "another model is asked; the next request brings it back"
        if idle > limit and self._patient.write(lambda session: requests.park(session, self._token, words, limit)):
            self._ask(StopReason.PARK)
            return True
        return False

    def _make_room(self) -> list[preempt.Preemption]:
        """Do what the housekeeper does every few seconds: a job is not to wait that long."""
        rules = preempt.PreemptionSettings.of(self._settings, self._site.room())
        return self._patient.write(lambda session: preempt.ask(session, rules)) or []

    def _last_words(self) -> None:
        """What the child says before it has left."""
        while not self._ended.wait(POLL_SECONDS):
            self._write_down()
        self._write_down()
