"""The trackers of an attempt: a process each, which shows it the curves (core/tracking). None of them may cost the run
anything: what fails is a notice."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core import HOME
from core.db.tables import Job
from core.jobs.base.states import Status
from core.jobs.base.transitions import append_events
from core.jobs.kinds import Kind
from core.jobs.lifecycle.claims import Claim
from core.tools import place
from core.tracking.follow_program import GRACE
from worker import processes
from worker.attempt.child import spawn_program
from worker.attempt.context import DATABASE_AWAY, WorkerContext
from worker.environment import tracker_environment

log = logging.getLogger("eft.worker")

PROGRAM = HOME / "core" / "tracking" / "follow_program.py"
LOG = "tracking-{}.log"
ORDER = "tracking-{}.json"
LEAVES = 15.0
"""Seconds after its grace in which a tracker's process has to be gone."""
WORDS = 1 << 12
"""Bytes of a tracker's log in which it says why it ended."""
ENDS: Mapping[Status | None, str] = {
    Status.SUCCEEDED: "succeeded",
    Status.FAILED: "failed",
    Status.CANCELLED: "cancelled",
}


class Trackers:
    """Call from one thread."""

    def __init__(self, site: WorkerContext, claim: Claim, folder: Path) -> None:
        wanted = claim.spec.get("tracking") or [] if claim.kind == Kind.TRAIN else []
        self._site, self._claim, self._folder = site, claim, folder
        self._wanted: list[dict[str, Any]] = wanted
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Begin to follow the attempt, whose folder is there."""
        for one in self._wanted:
            name = one["type"]
            tools = place(name, self._site.layout.cache)
            if not tools.is_dir():
                self._tell(name, "its library is not on this machine")
                continue
            try:
                self._running[name] = self._spawn(one, tools)
            except OSError as error:
                self._tell(name, f"its process could not be started: {error}")

    def look(self) -> None:
        """Tell of those that have ended, although the attempt has not."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[name]
                self._close(process)
                self._tell(name, self._last_words(name))

    def end(self, status: Status | None) -> None:
        """The attempt is over, and the job is `status` now; None: somebody else has it. They have a while to tell the
        rest, in which nobody waits for them."""
        for name, process in self._running.items():
            assert process.stdin is not None
            word = ENDS.get(status, "open")
            with contextlib.suppress(OSError):  # it has ended by itself; its log has why
                process.stdin.write(f"{word}\n".encode())
            threading.Thread(target=self._bury, args=(name, process), name="eft-tracker", daemon=True).start()
        self._running.clear()

    def _spawn(self, tracker: dict[str, Any], tools: Path) -> subprocess.Popen[bytes]:
        site, claim, name = self._site, self._claim, tracker["type"]
        job = claim.token.job_id
        order = {
            "tracker": name,
            "run_dir": str(self._folder),
            "told": {
                "job": job,
                "name": claim.spec.get("name") or job,
                "group": tracker.get("experiment") or tracker.get("project") or "eft",
                "params": _flat(claim.spec),
                "tags": claim.spec.get("tags") or [],
                "folder": str((site.settings.tracking_dir or site.layout.tracking).absolute() / name),
            },
        }
        path = self._folder / ORDER.format(name)
        path.write_text(json.dumps(order), encoding="utf-8")
        environment = tracker_environment(tools, site.layout.root)
        descriptor = os.open(
            self._folder / LOG.format(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            return spawn_program(PROGRAM, str(path), environment, descriptor)
        finally:
            os.close(descriptor)

    def _bury(self, name: str, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + GRACE + LEAVES
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        code = self._close(process)
        if code:
            log.warning("%s: tracker %s: %s", self._claim.label, name, self._last_words(name))

    def _close(self, process: subprocess.Popen[bytes]) -> int:
        """End what is left of it; its exit status."""
        processes.kill_session(process.pid)
        process.kill()
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        return code

    def _last_words(self, name: str) -> str:
        try:
            said = (self._folder / LOG.format(name)).read_bytes()[-WORDS:].decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1][:500] if lines else "its process ended without a word"

    def _tell(self, name: str, words: str) -> None:
        """A notice of the job; the run goes on."""
        log.warning("%s: tracker %s: %s", self._claim.label, name, words)
        token = self._claim.token
        notice = {"code": "tracking_failed", "message": f"{name} does not follow this attempt: {words}"}
        try:
            with self._site.database.write() as session:
                job = session.get(Job, token.job_id)
                if job is not None:
                    append_events(session, job, token.holds(), [("notice", time.time(), notice)])
        except DATABASE_AWAY as error:
            log.warning("database: %s; the notice is not kept", error)


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Fields by their dotted paths; what nobody has set is left out."""
    match value:
        case dict():
            parts = [_flat(one, f"{path}.{key}" if path else str(key)) for key, one in value.items()]
            return {key: words for part in parts for key, words in part.items()}
        case None | []:
            return {}
        case str():
            return {path: value}
        case _:
            return {path: json.dumps(value)}
