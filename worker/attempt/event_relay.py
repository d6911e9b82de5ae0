"""Carries what a child writes into its events.jsonl to the database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.jobs.lifecycle import claims, relay
from core.jobs.lifecycle.claims import Claim
from core.spec.run.folder import EVENTS_FILE
from worker.attempt.context import PatientDatabase, WorkerContext
from worker.attempt.hang_detector import HangDetector
from worker.store.publisher import Publisher


class EventRelay:
    """The events of one attempt. What it saw is remembered here: the last word, the first step, signs of life."""

    def __init__(self, context: WorkerContext, claim: Claim, folder: Path) -> None:
        self.last: dict[str, Any] | None = None
        """The newest `result` or `error` event."""
        self.stepped = False
        """Whether its trainer has done a step."""
        self.signs = HangDetector(claim.kind, context.settings)
        self.publisher: Publisher | None = None
        """Set once the child runs, where the data root is an object store."""
        self._context = context
        self._token = claim.token
        self._gpus = [context.gpus[slot.id] for slot in claim.slots if slot.id in context.gpus]
        self._path = folder / EVENTS_FILE
        self._offset = 0
        self._unsure = False

    def catch_up(self, database: PatientDatabase) -> None:
        """Tell what an earlier attempt wrote and its worker could not: the curve has no hole where a worker died."""
        earlier = database.read(lambda session: relay.untold(session, self._token.job_id, self._token.attempt))
        for attempt, offset in earlier or ():
            path = self._context.layout.attempt(self._token.job_id, attempt) / EVENTS_FILE
            while self._catch_up_batch(database, path, attempt, offset):
                offset = relay.read_batch(path, offset).end

    def _catch_up_batch(self, database: PatientDatabase, path: Path, attempt: int, offset: int) -> bool:
        batch = relay.read_batch(path, offset)
        if not batch.lines:
            return False
        return bool(database.write(lambda session: relay.relay(session, self._token, batch, of=attempt)))

    def tell(self) -> str | None:
        """Relay what is new; the stop that is asked for ("" for none), or None when the job is lost."""
        if self._unsure:
            with self._context.database.read() as session:
                self._offset = relay.told(session, self._token.job_id, self._token.attempt)
            self._unsure = False
        batch = relay.read_batch(self._path, self._offset)
        if not batch.lines:
            with self._context.database.read() as session:
                return claims.stop_requested(session, self._token)
        self.last = next((line for line in reversed(batch.lines) if line["type"] in ("result", "error")), self.last)
        self.stepped = self.stepped or any(line["type"] == "metrics" for line in batch.lines)
        self.signs.hear(batch.lines)
        self._add_figures(batch.lines)
        self._unsure = True  # an error of the commit does not say whether it was done
        with self._context.database.write() as session:
            claims.running(session, self._token)
            if not relay.relay(session, self._token, batch):
                return None
            stop = claims.stop_requested(session, self._token)
        self._unsure = False
        self._offset = batch.end
        for line in batch.lines:
            if line["type"] == "checkpoint" and self.publisher is not None:
                self.publisher.checkpoint(line["path"])
        return stop

    def _add_figures(self, lines: Sequence[dict[str, Any]]) -> None:
        """What the job's GPUs do now, at its newest step: the trainer itself is not told of it."""
        newest = next((line for line in reversed(lines) if line["type"] == "metrics"), None)
        if newest is not None and self._gpus and self._context.figures is not None:
            newest["values"] |= self._context.figures.metrics(self._gpus)

    def tell_rest(self) -> bool:
        """Relay to the end of the file. False: the job is lost."""
        while True:
            before = self._offset
            if self.tell() is None:
                return False
            if self._offset == before:
                return True
