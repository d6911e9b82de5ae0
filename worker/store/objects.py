"""The housekeeping of a data root that is an object store: what the rules let go, what nobody knows, and who uses how
much. One listing a time; the leader among the workers does it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from sqlalchemy import func, select

from core.db.engine import Database, read_now
from core.db.tables import Artifact, Job
from core.jobs.base.states import FINAL
from core.jobs.housekeeping import unknown_files
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.retention import DAY, RetentionRules
from core.jobs.policies import audit, budget, usage
from core.jobs.policies.budget import Kind
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS
from core.storage.bucket import LOG, Bucket
from core.storage.store import StoredObject

log = logging.getLogger("eft.housekeeping")

ORPHAN_SECONDS = 24 * 3600.0


def remove_orphans(database: Database, bucket: Bucket, older_than: float = ORPHAN_SECONDS) -> list[str]:
    """Remove aborted uploads, and files and runs without a row in the database. Returns their names."""
    bucket.sweep(older_than)
    young = time.time() - older_than
    old = [entry.key.partition("/")[2] for entry in bucket.tree("files") if entry.modified < young]
    runs = {job_id: max(entry.modified for entry in entries) for job_id, entries in _runs(bucket).items()}
    quiet = [job_id for job_id, modified in runs.items() if modified < young]
    with database.read() as session:
        files = unknown_files(session, old)
        known = usage.owners_of_runs(session, quiet)
    gone = [f"files/{name}" for name in files] + [f"runs/{job_id}" for job_id in quiet if job_id not in known]
    for key in gone:
        bucket.discard(key)
    return gone


def collect(database: Database, bucket: Bucket, rules: RetentionRules) -> int:
    """What the rules of retention let go of runs (core/jobs/lifecycle/retention.py); bytes."""
    runs, freed = _runs(bucket), 0
    for job_id, entries in runs.items():
        with database.read() as session:
            job = session.execute(select(Job).where(Job.id == job_id)).scalar_one_or_none()
            now = read_now(session)
            if job is None or job.finished_at is None or job.status not in {status.value for status in FINAL}:
                continue
            age = (now - job.finished_at) / DAY
            going: set[str] = set()
            if rules.checkpoints_days and age > rules.checkpoints_days:
                before = now - rules.checkpoints_days * DAY
                if not session.execute(select(retention.resumed(job_id, before))).scalar_one():
                    newest = select(func.max(Artifact.attempt)).where(Artifact.job_id == job_id)
                    going |= _spare(entries, session.execute(newest).scalar_one())
            if rules.history_days and age > rules.history_days:
                going |= {_part(entry.key) for entry in entries if _part(entry.key).endswith(f"/{LOG}")}
        if not going:
            continue
        count = sum(entry.bytes for entry in entries if _part(entry.key) in going)
        with database.write() as session:
            told = {"kind": "checkpoints", "bytes": count, "why": f"its job ended {age:.0f} days ago"}
            audit.record(session, None, "gc.remove", job_id, told, project_id=job.project_id)
        for key in sorted(going):
            bucket.discard(key)
        freed += count
    return freed


def measure(database: Database, bucket: Bucket) -> None:
    """Bring `usage.disk_bytes` and `disk_usage` up to date."""
    used: dict[Kind, int] = dict.fromkeys(budget.KINDS, 0)
    kinds: dict[str, Kind] = {"files": "uploads", "models": "models", "runs": "runs"}
    taken: dict[str, int] = defaultdict(int)
    for entry in bucket.tree(""):
        parts = entry.key.split("/")
        kind = kinds.get(parts[0], "other")
        if kind == "runs" and len(parts) > 3:
            taken[parts[1]] += entry.bytes
            kind = "checkpoints" if parts[3] == CHECKPOINTS else kind
        used[kind] += entry.bytes
    with database.read() as session:
        owners = usage.owners_of_runs(session, list(taken))
    runs: dict[tuple[str, str], int] = defaultdict(int)
    for job_id, whose in owners.items():
        runs[whose] += taken[job_id]
    with database.write() as session:
        usage.tell_disk(session, runs)
        budget.tell(session, used)


def _runs(bucket: Bucket) -> dict[str, list[StoredObject]]:
    found: dict[str, list[StoredObject]] = defaultdict(list)
    for entry in bucket.tree("runs"):
        found[entry.key.split("/")[1]].append(entry)
    return found


def _part(key: str) -> str:
    """`runs/JOB/attempt-N/PART` of a key of a run."""
    return "/".join(key.split("/")[:4])


def _spare(entries: list[StoredObject], handed_back: int | None) -> set[str]:
    """Parts of an ended job that are no longer needed: checkpoints, and artifacts that it does not hand back."""
    parts = {_part(entry.key) for entry in entries}
    return {
        part
        for part in parts
        if part.endswith(f"/{CHECKPOINTS}")
        or (part.endswith(f"/{ARTIFACTS}") and f"/attempt-{handed_back}/" not in part)
    }
