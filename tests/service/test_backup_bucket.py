"""A backup of an installation whose data root is an object store: the database, and nothing of the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert, update

from box.backup import store as backups
from box.backup.create import Options, create
from box.backup.restore import restore
from core.db.engine import Database
from core.db.migrate import upgrade
from core.db.tables import Job, Project, User
from core.jobs import installation
from core.jobs.submit import Actor, submit
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from core.storage.store import open_store
from tests.support import boxes

ADA = Actor("user-ada", "proj-lab")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    (tmp_path / "s3").mkdir()
    with boxes.object_store(tmp_path / "s3") as port:
        url = f"http://127.0.0.1:{port}"
        assert httpx.put(f"{url}/lab", trust_env=False).status_code == 200
        keys = {"s3_access_key_id": "lab", "s3_secret_access_key": "secret"}
        yield Settings(data="s3://lab/eft", work=tmp_path / "work", s3_endpoint=url, min_free_bytes=0, **keys)


def test_a_backup_beside_a_bucket_keeps_the_database(settings: Settings, tmp_path: Path) -> None:
    bucket, database = open_store(settings), Database(settings.sqlalchemy_url)
    settings.root.mkdir(parents=True, exist_ok=True)
    upgrade(database)
    installation.check_data_root(database, bucket, "the API")
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
        source = "file-0123456789abcdefghjkmnpqrs"
        job_id = submit(session, ADA, resolve(JobSpec.model_validate({"model": "team/tiny", "data": source}))).id
        session.execute(update(Job).where(Job.id == job_id).values(attempt=2))
    for number in (1, 2, 3):
        bucket.write(f"runs/{job_id}/attempt-{number}/log.txt", b"x")
    kept = backups.Store(tmp_path / "backups")
    made = create(database, Layout(settings.root), kept, Options(bucket=settings.data))
    assert (made.files, made.bucket) == (0, settings.data)
    database.dispose()
    with pytest.raises(backups.BackupError, match="set EFT_DATA"):
        restore(Settings(data=str(tmp_path / "folder")), kept)
    new = settings.model_copy(update={"work": tmp_path / "new"})
    with pytest.raises(backups.BackupError, match="jobs are at work in s3://lab/eft: runs/"):
        restore(new, kept)
    assert bucket.size(f"runs/{job_id}/attempt-3/log.txt") == 1, "a trial beside a live installation does no harm"
    new = new.model_copy(update={"lease_seconds": 0.0})  # nobody has written for that long
    restore(new, kept)
    database = Database(settings.sqlalchemy_url)
    with pytest.raises(installation.OtherDataRoot):  # the old one, if it should come back
        installation.check_data_root(database, bucket, "the API that was lost")
    database.dispose()
    left = sorted(entry.key for entry in bucket.tree(f"runs/{job_id}"))
    assert left == [f"runs/{job_id}/attempt-{number}/log.txt" for number in (1, 2)]
    again = Database(new.sqlalchemy_url)
    installation.check_data_root(again, bucket, "the API elsewhere")
    with again.read() as session:
        assert session.get_one(Job, job_id).attempt == 2
    again.dispose()
