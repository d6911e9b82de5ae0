"""What all attempts of a worker share, and its database, which may be away for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.hardware.discover import Gpu
from core.settings import Settings
from core.storage.checkpoints import Snapshots
from core.storage.layout import Layout
from worker.attempt.fork_server import ForkServer
from worker.attempt.standby import StandbyTrainers
from worker.gpus.gpu_memory import Quarantine
from worker.gpus.gpu_stats import GpuStats
from worker.gpus.selftest import SelfTests
from worker.store.local_cache import LocalCache

log = logging.getLogger("eft.worker")
T = TypeVar("T")

DATABASE_AWAY = (OperationalError, InterfaceError)
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class WorkerContext:
    """What all attempts of a worker share."""

    settings: Settings
    database: Database
    layout: Layout
    node: str
    gpus: Mapping[str, Gpu]
    """The GPU slots by their ids; other slots have none."""
    threads: int
    """CPU threads of one trainer."""
    spares: StandbyTrainers | None = None
    """None: every trainer on a GPU starts cold (EFT_SPARE)."""
    forks: ForkServer | None = None
    """What forks the children of a box without GPUs; None until it may."""
    leaving: threading.Event = field(default_factory=threading.Event)
    quarantine: Quarantine | None = None
    """GPUs that have not given their memory back; None on a box without GPUs."""
    selftests: SelfTests | None = None
    """What is known of the devices of its slots."""
    figures: GpuStats | None = None
    """What the GPUs do at this moment."""
    snapshots: Snapshots | None = None
    """Where trainers leave snapshots in memory; None: nowhere."""
    copies: LocalCache | None = None
    """What this box has of a data root that is an object store; None: the data root is a folder."""
    invite: Callable[[], None] = lambda: None
    """Looks for sessions that may share a process which has become ready for it."""
    room: Callable[[], int | None] = lambda: None
    """Bytes that a job may take of the data root; None: not measured."""
    abandon: threading.Event = field(default_factory=threading.Event)
    """The worker ends now: whatever could not be written is left to the lease."""


class PatientDatabase:
    """Transactions that wait for a database that is away. `gives_up` waits so many seconds, and says whether to stop
    trying; the answer is None then."""

    def __init__(self, database: Database, gives_up: Callable[[float], bool]) -> None:
        self._database = database
        self._gives_up = gives_up

    def read(self, action: Callable[[Session], T]) -> T | None:
        def transaction() -> T:
            with self._database.read() as session:
                return action(session)

        return self.persist(transaction)

    def write(self, action: Callable[[Session], T]) -> T | None:
        def transaction() -> T:
            with self._database.write() as session:
                return action(session)

        return self.persist(transaction)

    def persist(self, action: Callable[[], T]) -> T | None:
        told = False
        while True:
            try:
                return action()
            except DATABASE_AWAY as error:
                if not told:
                    log.warning("database: %s; trying again", error)
                    told = True
                if self._gives_up(RETRY_SECONDS):
                    return None
