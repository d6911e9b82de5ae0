"""A backup of an installation whose data root is an object store: the database, and nothing of the bucket."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, insert, select, update

from box.backup import store as backups
from box.backup.create import Options, create
from box.backup.restore import restore
from box.backup.settle import RESTORED
from core.db.engine import Database
from core.db.migrate import upgrade
from core.db.tables import Audit, Installation, Job, Project, User
from core.jobs import installation
from core.jobs.lifecycle.submit import Actor, submit
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import HalfRestored, Layout
from core.storage.open import open_store
from core.storage.store import Store
from tests.support import boxes
from tests.support.killed import killed

ADA = Actor("user-ada", "proj-lab")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with boxes.object_store(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def settings(server: int, tmp_path: Path) -> Settings:
    """A bucket and a work folder of the test's own."""
    url, name = f"http://127.0.0.1:{server}", f"lab-{secrets.token_hex(4)}"
    assert httpx.put(f"{url}/{name}", trust_env=False).status_code == 200
    keys = {"s3_access_key_id": "lab", "s3_secret_access_key": "secret"}
    return Settings(data=f"s3://{name}/eft", work=tmp_path / "work", s3_endpoint=url, min_free_bytes=0, **keys)


def installed(settings: Settings) -> tuple[Store, Database, str]:
    """One with a job whose third and fourth attempt the database, as it is kept, has never heard of."""
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
    for number in (1, 2, 3, 4):
        bucket.write(f"runs/{job_id}/attempt-{number}/log.txt", b"x")
    return bucket, database, job_id


def test_a_backup_beside_a_bucket_keeps_the_database(settings: Settings, tmp_path: Path) -> None:
    bucket, database, job_id = installed(settings)
    kept = backups.BackupStore(tmp_path / "backups")
    made = create(database, Layout(settings.root), kept, Options(bucket=settings.data))
    assert (made.files, made.bucket) == (0, settings.data)
    database.dispose()
    with pytest.raises(backups.BackupError, match="set EFT_DATA"):
        restore(Settings(data=str(tmp_path / "folder")), kept)
    new = settings.model_copy(update={"work": tmp_path / "new"})
    with pytest.raises(backups.BackupError, match=f"jobs are at work in {settings.data}: runs/"):
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


def test_a_restore_that_is_killed_anywhere_is_ended_by_the_same_command(settings: Settings, tmp_path: Path) -> None:
    """And nothing starts on what is half of it: neither the old installation nor the new one."""
    bucket, database, job_id = installed(settings)
    kept = backups.BackupStore(tmp_path / "backups")
    create(database, Layout(settings.root), kept, Options(bucket=settings.data))
    name = f"restore of {kept.names()[-1]}"
    new = settings.model_copy(update={"work": tmp_path / "new"})
    variables = {
        "EFT_DATA": settings.data, "EFT_WORK": str(new.work), "EFT_S3_ENDPOINT": settings.s3_endpoint,
        "EFT_S3_ACCESS_KEY_ID": "lab", "EFT_S3_SECRET_ACCESS_KEY": "secret",
        "EFT_RENEW_SECONDS": "0.1", "EFT_FENCE_SECONDS": "0.2", "EFT_LEASE_SECONDS": "0.3",
    }  # fmt: skip
    places = [
        "core.storage.bucket:Bucket.write",  # the probe of its clock
        "box.backup.restore:_settled_copy",
        "box.backup.restore:_database",
        "core.jobs.installation:write_mark",
        "core.storage.bucket:Bucket.discard#2",  # the probe first, then one of two attempts
        "core.storage.bucket:Bucket.discard#2",  # the other one
    ]
    written = time.monotonic()
    with killed("box.restore", places, [str(kept.root)], variables) as tries:
        while time.monotonic() < written + 2.0:  # the store's times are whole seconds
            time.sleep(0.05)
        for place in places:
            code, told = next(tries)
            assert code == -signal.SIGKILL, (place, told)
            if Path(new.root / "eft.db").exists():
                half = Database(new.sqlalchemy_url)
                for refused in (installation.check_data_root, installation.adopt):
                    with pytest.raises(HalfRestored, match="run `eft restore` again"):
                        refused(half, bucket, "the API elsewhere")
                half.dispose()
        code, told = next(tries)
        assert code == 0 and "restored" in told, told
    with pytest.raises(installation.OtherDataRoot, match="a copy or another one"):
        installation.check_data_root(database, bucket, "the API that was lost")
    database.dispose()
    assert sorted(entry.key for entry in bucket.tree("")) == sorted(
        ["installation.json", *(f"runs/{job_id}/attempt-{number}/log.txt" for number in (1, 2))]
    )
    again = Database(new.sqlalchemy_url)
    installation.check_data_root(again, bucket, "the API elsewhere")
    with again.read() as session:
        found = installation.find(session)
        assert found.marked_by is not None and name in found.marked_by
        assert session.execute(select(func.count()).where(Audit.action == RESTORED)).scalar_one() == 1
    elsewhere = new.model_copy(update={"lease_seconds": 0.0})
    with pytest.raises(backups.BackupError, match="to the end: nothing is left to do"):
        restore(elsewhere, kept)
    # As a restore of a later backup leaves it that was killed between two schemas: the audit is of the one before.
    with again.write() as session:
        session.execute(update(Installation).values(mark=installation.CLOSED))
    with pytest.raises(HalfRestored):
        installation.check_data_root(again, bucket, "the API elsewhere")
    again.dispose()
    with pytest.raises(backups.BackupError, match="a backup goes into a new database"):
        restore(elsewhere, kept)
