"""A restore beside a bucket: the database alone is put back, and the bucket, which is there, is taken over.

The new database is closed until all of it is done (core/jobs/installation.py): its row has a mark that no data root
has, with the token that the bucket will get, so that nothing of eft starts on half of it, and the same command goes on
where one broke off. First the bucket's mark: what is started of the old installation from then on is refused, and does
no harm. Then the attempts that the database has never heard of, whose numbers will be used again, are taken away. Then
the database is opened.
"""

from __future__ import annotations

from sqlalchemy import select

from box.backup.store import BackupError
from core.db.engine import Database
from core.db.tables import Job
from core.jobs import installation
from core.settings import Settings
from core.storage.store import Store

PROBE = "restoring"
"""Object written to a bucket for a moment, to read the bucket's clock."""


def require_quiet(bucket: Store, settings: Settings) -> None:
    """Raises BackupError while jobs of the installation that is to be replaced still write there: a restore that is
    only tried would take its attempts away. Times are the store's own."""
    bucket.write(f"{PROBE}/now", b"")
    now = max(entry.modified for entry in bucket.tree(PROBE))
    bucket.discard(PROBE)
    for entry in bucket.tree("runs"):
        if (age := now - entry.modified) < settings.lease_seconds:
            raise BackupError(
                f"jobs are at work in {bucket.where}: {entry.key} was written {age:.0f} s ago. Stop that installation "
                f"for good and wait {settings.lease_seconds:.0f} s (EFT_LEASE_SECONDS); to try a restore beside it, "
                "restore into a copy of the bucket"
            )


def take_over(database: Database, bucket: Store, who: str) -> None:
    """Every step may be done again. Raises EftError."""
    with database.read() as session:
        row = installation.find(session)
        rows = session.execute(select(Job.id, Job.attempt)).all()
    newest: dict[str, int] = {job.id: job.attempt for job in rows}
    token = installation.closed(row)
    assert token is not None
    installation.write_mark(bucket, row.id, token, who)
    newer = set()
    for entry in bucket.tree("runs"):
        _, job, attempt, *_ = [*entry.key.split("/"), "", ""]
        number = attempt.removeprefix("attempt-")
        if number.isdecimal() and int(number) > newest.get(job, int(number)):
            newer.add(f"runs/{job}/{attempt}")
    for key in sorted(newer):
        bucket.discard(key)
    installation.open_to(database, bucket, row.id, token, who)
