"""When each key was last used, to about a minute: noted in memory, written now and then by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from api.auth.policy import Principal
from api.web import sessions as web
from core.db.engine import Database, db_now, read_now
from core.db.tables import ApiKey

log = logging.getLogger("eft.api.auth")

WRITE_SECONDS = 60.0


class LastUse:
    """No request waits for the database on its account. What a crash forgets is a minute of times."""

    def __init__(self, database: Database, seconds: float = WRITE_SECONDS, *, idle_seconds: float = 12 * 3600) -> None:
        """`idle_seconds`: how long a session lasts after it was used."""
        self._database = database
        self._idle_seconds = idle_seconds
        self._seconds = seconds
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        """Key → when, by this process's monotonic clock; until that is written."""
        self._sessions: set[str] = set()
        """Those of them that are sessions of browsers."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="last use of keys", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is left. Waits a moment for a database that is slow, not for one that is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def note(self, principal: Principal) -> None:
        assert principal.key_id is not None
        with self._lock:
            self._seen[principal.key_id] = time.monotonic()
            if principal.session:
                self._sessions.add(principal.key_id)

    def write(self) -> None:
        """One transaction for all keys that were used since the last one; nothing when none was."""
        with self._lock:
            seen, sessions = dict(self._seen), set(self._sessions)
        if not seen:
            return
        try:
            with self._database.write() as session:
                now = time.monotonic()
                for key_id, when in sorted(seen.items()):  # in one order, so that processes do not block one another
                    moment = db_now() - (now - when)
                    session.execute(
                        update(ApiKey)
                        .where(ApiKey.id == key_id, (ApiKey.last_used_at.is_(None)) | (ApiKey.last_used_at < moment))
                        .values(last_used_at=moment)
                        .execution_options(synchronize_session=False)
                    )
                for key_id in sorted(seen.keys() & sessions):
                    web.prolong(session, key_id, read_now(session) - (now - seen[key_id]), self._idle_seconds)
        except SQLAlchemyError as error:
            log.warning("the last uses of keys could not be written; they are kept and tried again: %s", error)
            return
        with self._lock:  # a key that was used meanwhile is written the next time
            self._sessions -= {key_id for key_id in sessions if seen.get(key_id) == self._seen.get(key_id)}
            self._seen = {key_id: when for key_id, when in self._seen.items() if seen.get(key_id) != when}

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.write()
        self.write()
