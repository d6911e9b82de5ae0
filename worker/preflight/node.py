"""What must hold before a worker may serve a box: alone under its name, the right schema, one disk with the API."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Attempt, Job
from core.jobs.base.states import Status
from core.jobs.lifecycle import lease_expiry
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.settings import Settings
from core.storage.checkpoints import Snapshots
from core.storage.layout import Layout
from worker import leftovers, processes

log = logging.getLogger("eft.worker")


class Refused(Exception):
    """This worker may not serve; the message says why, and what to do."""


class NotNow(Refused):
    """The reason may pass by itself: worth another start."""


def lock(root: Path, node: str) -> int:
    """Hold the node's name for as long as this process lives. Raises Refused while another worker has it."""
    folder = root / "nodes"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(file_of(root, node, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise Refused(
            f"another worker (process {holder}) serves node `{node}` already; one worker serves all GPUs of a box. "
            "Stop that one first, or give this one a name of its own (EFT_NODE)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def file_of(root: Path, node: str, ending: str) -> Path:
    """Path of a file of this node, below the folder that it works in."""
    return root / "nodes" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', node)}.{ending}"


def probe(layout: Layout, node: str) -> None:
    """Write and read back: whether it is the installation's data root was seen before (worker/preflight/joining.py).

    Call it while the node's lock is held: a worker that is killed here leaves a file that the next one writes again.
    """
    path = file_of(layout.root, node, "probe")
    content = secrets.token_bytes(32)
    try:
        path.write_bytes(content)
        same = path.read_bytes() == content
        path.unlink()
    except OSError as error:
        raise Refused(f"{layout.root} cannot be written to: {error}") from error
    if not same:
        raise Refused(f"{layout.root} does not give back what was written to it")


def check_schema(database: Database) -> None:
    """Raises Refused for a schema that this code may not use (core/db/migrate.py)."""
    try:
        standing = migrate.standing(database)
    except SQLAlchemyError as error:
        raise NotNow(f"the database cannot be reached ({error}); see EFT_DATABASE_URL") from error
    if not standing.fit:
        raise Refused(f"the database {standing.words}")
    if standing.newer:
        log.warning("the database has schema %s", standing.words)


def loss_policy(settings: Settings) -> LossPolicy:
    return LossPolicy(settings.max_lost_workers, settings.retry_backoff_seconds)


def clear_orphans(
    database: Database, layout: Layout, node: str, worker: str, policy: LossPolicy, snapshots: Snapshots | None = None
) -> int:
    """End what an earlier worker of this node left running, bring the snapshots of its trainers to the disk, and hand
    its jobs back. Returns how many.

    The node's lock is held, so that worker is gone. Its children end by themselves when it goes; here we see to it.
    """
    with database.read() as session:
        left = lease_expiry.orphans(session, node, worker)
    for job, attempt in left:
        _end_processes(attempt, layout.attempt(job.id, attempt.attempt))
        leftovers.clear(layout.attempt(job.id, attempt.attempt))
        if snapshots is not None and snapshots.left(job.id):
            snapshots.bring_down(job.id, layout.attempt(job.id, attempt.attempt))
        with database.write() as session:
            again = session.execute(
                select(Job)
                .where(Job.id == job.id, Job.attempt == job.attempt, Job.worker == job.worker)
                .with_for_update()
            ).scalar_one_or_none()
            if again is not None:
                lease_expiry.lose(session, again, f"the worker on {node} ended without handing it back", policy)
                log.warning("%s: returned to the queue; the previous worker of this node left it", job.id)
    if snapshots is not None:
        _free_memory(database, snapshots)
    return len(left)


def _free_memory(database: Database, snapshots: Snapshots) -> None:
    """Snapshots that no attempt goes on from, of jobs that have ended or that another box has."""
    with database.read() as session:
        for job_id in snapshots.jobs():
            job = session.get(Job, job_id)
            if job is None or job.status != Status.QUEUED or not snapshots.attempt(job_id, job.attempt).is_dir():
                snapshots.forget(job_id)


def _end_processes(attempt: Attempt, folder: Path) -> None:
    leaders = {process.pid for process in processes.running_in(folder)}
    if attempt.pid is not None:
        seen = processes.look(attempt.pid)
        # Nobody there: members of its session may still live, and pin its number. Somebody there with another start
        # time: the number was given away again, so nothing of that session lived any more.
        if seen is None or (attempt.pid_started is not None and abs(seen.started - attempt.pid_started) < 0.02):
            leaders.add(attempt.pid)
    for leader in leaders:
        while not processes.end_session(leader, 30.0):
            log.error("process %d of %s cannot be killed; waiting for it", leader, attempt.job_id)
