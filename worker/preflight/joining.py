"""What must hold before a worker serves an installation, said in words: its broker, its data root, its version, its
clock. Database and schema are looked at before (worker/preflight/node.py)."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import redis
from sqlalchemy import select

from core import __version__, health
from core.base.files import write_private
from core.db.engine import Database, db_now
from core.db.tables import Node
from core.jobs import installation
from core.jobs.installation import OtherDataRoot
from core.settings import Settings
from core.storage.layout import HalfRestored
from core.storage.store import Store, StoreAway
from worker.messages import broker_place
from worker.preflight.node import NotNow, Refused, file_of

log = logging.getLogger("eft.worker")

SKEW_SECONDS = 2.0
"""By so much a box's clock may differ before it is told."""


def check_broker_is_named(settings: Settings) -> None:
    """Raises NotNow for a worker that was told of a database elsewhere and of no broker, where no embedded one has ever
    run (one that has may be about to come back)."""
    if settings.database_url and not settings.broker_url and not (settings.root / "broker").exists():
        raise NotNow(
            "EFT_DATABASE_URL names the database of an installation, and EFT_BROKER_URL no broker (the embedded one, "
            f"{settings.broker_socket}, does not run here). A worker joins by three settings: EFT_DATABASE_URL, "
            "EFT_BROKER_URL and EFT_DATA, the same as the API's (docs/boxes.md)"
        )


def join(database: Database, store: Store, settings: Settings) -> list[str]:
    """Notes for the node's row. Raises Refused, or NotNow for what may pass by itself."""
    try:
        installation.check_data_root(database, store, f"the worker on {settings.node}")
    except StoreAway as error:
        raise NotNow(error.message) from error
    except (OtherDataRoot, HalfRestored) as error:
        raise Refused(error.message) from error
    standing = installation.standing(database, __version__)
    if not standing.fit:
        raise Refused(standing.words)
    return [words for words in (standing.words, _clock(database)) if words]


def check_name(database: Database, settings: Settings) -> None:
    """With an object store the lock on a node's name is this box's own: raises NotNow while a worker of another box
    serves under it."""
    with database.read() as session:
        row = session.execute(
            select(Node.worker, db_now() - Node.heartbeat_at).where(Node.name == settings.node)
        ).one_or_none()
    if row is None or row[1] > settings.lease_seconds:
        return
    last = _last_worker(settings)
    if not last.is_file() or last.read_text() != row[0]:
        raise NotNow(
            f"a worker on another box serves node `{settings.node}` (heard from {row[1]:.0f} s ago). Give this one "
            f"a name of its own (EFT_NODE); if that box is gone, wait {settings.lease_seconds:.0f} s"
        )


def remember_worker(settings: Settings, worker: str) -> None:
    """This box serves the node as `worker` from now on."""
    write_private(_last_worker(settings), worker.encode())


def _last_worker(settings: Settings) -> Path:
    return file_of(settings.root, settings.node, "worker")


def _clock(database: Database) -> str:
    """Leases, the queue and every time that is compared are the database's; what a trainer tells has its box's time."""
    began = time.time()
    theirs = database.now()
    ended = time.time()
    ahead = (began + ended) / 2 - theirs
    if abs(ahead) <= SKEW_SECONDS + (ended - began) / 2:
        return ""
    return (
        f"this box's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the database's: jobs run "
        "correctly, but times in their logs and curves are off by that; let the box set its clock (chrony or another "
        "NTP)"
    )


def check_broker(database: Database, settings: Settings) -> None:
    """Two installations on one broker would wake one another's workers instead of their own: raises Refused. One that
    does not answer yet is waited for later, by Celery."""
    with database.read() as session:
        name = installation.find(session).id
    url = settings.celery_broker_url.replace("redis+socket://", "unix://", 1)
    seconds = health.BROKER_TIMEOUT
    try:
        with redis.Redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=seconds) as client:
            client.set(
                installation.BROKER_KEY, name, nx=bool(settings.broker_url)
            )  # the embedded one is this data root's own
            found = client.get(installation.BROKER_KEY)
    except (redis.RedisError, ValueError, OSError) as error:
        log.warning(
            "%s does not answer yet (%s); nothing wakes this worker until it does", broker_place(settings), error
        )
        return
    if isinstance(found, bytes) and found.decode(errors="replace") != name:
        raise Refused(
            f"the broker at EFT_BROKER_URL belongs to another installation ({found.decode(errors='replace')}, this "
            f"database is that of {name}). Give each a broker of its own, or a number of its own (redis://host:6379/1)"
        )
