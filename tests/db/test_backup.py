"""Backups of real rows and real folders on both databases: what is kept, what is not, and what breaks off half way."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from box.backup.create import Options, create
from box.backup.restore import restore
from box.backup.settle import HELD, settle
from box.backup.store import BackupError, BackupStore, Snapshot
from core.db import migrate
from core.db.engine import Database, db_now
from core.db.tables import Allocation, Attempt, Base, Delivery, File, Installation, Job, Leader, Webhook
from core.ids import new_id
from core.jobs import installation
from core.jobs.base.slots import Slot
from core.jobs.lifecycle import claims, deletion, leader
from core.jobs.lifecycle.finish import Failed, RetryPolicy, finish
from core.settings import Settings
from core.spec.run.checkpoint_names import Progress, checkpoint_name
from core.storage.layout import RESTORING, HalfRestored, Layout
from core.train.checkpoint import store as checkpoints
from tests.support.lab import Lab

NOT_COMPARED = {"leaders", "audit", "installation", "outbox", "schema_floor"}


@pytest.fixture
def store(tmp_path: Path) -> BackupStore:
    return BackupStore(tmp_path / "backups")


@pytest.fixture
def another(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Settings]:
    """Settings of an empty installation on the same kind of database, or the one that is named."""

    def made(name: str = "new", kind: str | None = None) -> Settings:
        url = f"sqlite:///{tmp_path / name / 'eft.db'}"
        if (kind or database.url.get_backend_name()) == "postgresql":
            url = request.getfixturevalue("postgres_databases")()
        return Settings(data=str(tmp_path / name), database_url=url)

    return made


def upload(lab: Lab, layout: Layout, content: bytes) -> str:
    actor, file_id = lab.actor("ada"), new_id("file")
    layout.file(file_id).write_bytes(content)
    values = {"filename": "rows.jsonl", "bytes": len(content), "rows": 1, "format": "text"}
    with lab.database.write() as session:
        ids = {"id": file_id, "owner_id": actor.user_id, "project_id": actor.project_id}
        session.execute(insert(File).values(**ids, **values, sha256=hashlib.sha256(content).hexdigest()))
    return file_id


def run(lab: Lab, layout: Layout, name: str) -> claims.Claim:
    """A job that a worker holds, with a checkpoint and a log."""
    lab.job(name)
    claim = lab.claim()
    assert claim is not None
    folder = layout.attempt(claim.token.job_id, 1)
    for path in ("checkpoints/step-00000004/state.bin", "checkpoints/tmp-step-00000008-1/state.bin", "log.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(path.encode() * 1000)
    return claim


def content(root: Path) -> dict[str, bytes]:
    folders = [root / name for name in ("files", "runs", "models")]
    return {str(p.relative_to(root)): p.read_bytes() for one in folders for p in one.rglob("*") if p.is_file()}


def rows(database: Database) -> dict[str, list[dict[str, Any]]]:
    with database.read() as session:
        return {
            table.name: [dict(row) for row in session.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in Base.metadata.sorted_tables
            if table.name not in NOT_COMPARED
        }


def opened(settings: Settings) -> Database:
    return Database(settings.sqlalchemy_url)


def test_all_of_it_comes_back(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings], tmp_path: Path
) -> None:
    upload(lab, layout, b"one")
    lab.job("waits", prepared=False)
    with lab.database.write() as session:
        session.execute(insert(Installation).values(id="inst-lab", mark="of the root that was"))
    model = layout.models / "hub" / "a--b" / "c" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (layout.models / ".partial").mkdir()
    (layout.models / ".partial" / "half").write_text("half")
    (layout.cache / "packed").mkdir()
    (layout.cache / "packed" / "x").write_text("can be made again")
    made = create(lab.database, layout, store, Options())
    assert made.missing == [] and list(store.damage(made)) == []
    kinds = ["sqlite", "postgresql"] if lab.database.is_sqlite else ["postgresql"]
    for kind in kinds:
        settings = another(kind, kind)
        restore(settings, store)
        new = opened(settings)
        assert rows(new) == rows(lab.database)
        with new.read() as session:  # the one that it was, and no second one made by the migrations
            row = installation.find(session)
            assert (row.id, row.mark) == ("inst-lab", None)
        assert migrate.standing(new).fit
        new.dispose()
        expected = {name: data for name, data in content(layout.root).items() if "half" not in name}
        assert content(settings.root) == expected
        assert not list((settings.root / "cache").iterdir())
        assert settings.root.stat().st_mode & 0o777 == 0o700
    if not lab.database.is_sqlite:
        with pytest.raises(BackupError, match="a backup of postgresql goes into postgresql"):
            restore(another("wrong", "sqlite"), store)


@pytest.mark.one_database
def test_the_second_one_brings_only_what_is_new(lab: Lab, layout: Layout, store: BackupStore) -> None:
    upload(lab, layout, b"x" * 50_000)
    first = create(lab.database, layout, store, Options())
    assert first.brought == 50_000
    assert create(lab.database, layout, store, Options()).brought == 0
    upload(lab, layout, b"x" * 50_000)  # the same content is kept once
    new = upload(lab, layout, b"y" * 10)
    third = create(lab.database, layout, store, Options(checksum=True))
    assert (third.brought, third.bytes, third.files) == (10, 100_010, 3)
    assert len(list(store.objects.glob("??/*"))) == 2
    with lab.database.write() as session:
        session.delete(session.get_one(File, new))
    layout.file(new).unlink()
    fourth = create(lab.database, layout, store, Options())
    with store.writing():
        gone, freed = store.prune(1)
    assert len(gone) == 3 and freed == 10 and store.names() == [fourth.name]
    assert list(store.damage(fourth)) == []


@pytest.mark.one_database
def test_a_backup_keeps_a_job_that_is_deleted(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]
) -> None:
    claim = run(lab, layout, "a")
    with lab.database.write() as session:
        finish(session, claim.token, "train", Failed("user", "x", "y"), 0, RetryPolicy())
    kept = content(layout.root)
    first = create(lab.database, layout, store, Options())
    actor = lab.actor("ada")
    with lab.database.write() as session:
        assert deletion.remove(session, actor, claim.token.job_id, deletion.Freed(), 3600.0)
    shutil.rmtree(layout.job(claim.token.job_id))
    second = create(lab.database, layout, store, Options())
    assert [list(store.damage(one)) for one in (first, second)] == [[], []] and second.files == 0
    settings = another()
    restore(settings, store, first.name)
    assert content(settings.root) == {name: data for name, data in kept.items() if "tmp-" not in name}


def test_what_runs_is_handed_back_and_charged_to_the_backup(lab: Lab, layout: Layout, store: BackupStore) -> None:
    ran, paused = run(lab, layout, "runs"), run(lab, layout, "pausing")
    actor = lab.actor("ada")
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == paused.token.job_id).values(status="pausing"))
        owner = {"owner_id": actor.user_id, "project_id": actor.project_id}
        hook = {"name": "ci", "kind": "standard", "url": "https://9.9.9.9/", "events": ["job.paused"], "secrets": []}
        session.execute(insert(Webhook).values(id="hook-a", **hook, **owner))
        told = {"webhook_id": "hook-a", "type": "job.started", "data": {}}
        session.execute(insert(Delivery).values(id="msg-a", **told, **owner))
        session.execute(insert(Delivery).values(id="msg-b", **told, **owner, state="delivered"))
    assert leader.lead(lab.database, "housekeeping", "worker-x", 600)
    with lab.database.write() as session:
        now = float(session.execute(select(db_now())).scalar_one())
        done = settle(session, "a backup", now - 100, "hold")
    assert sorted(done.handed_back) == sorted([ran.token.job_id, paused.token.job_id]) and done.held == 2
    with lab.database.read() as session:
        assert session.get_one(Job, ran.token.job_id).status == "queued"
        assert "restored from the backup a backup" in session.get_one(Job, ran.token.job_id).reason
        assert session.get_one(Job, paused.token.job_id).status == "paused"
        assert session.execute(select(Leader.role)).all() == []
        for ended in (Allocation.released_at, Attempt.ended_at):
            assert session.execute(select(ended)).scalars().all() == [now - 100] * 2, "not until the restore"
        states = dict(session.execute(select(Delivery.id, Delivery.state)).all())
        assert states.pop("msg-b") == "delivered" and set(states.values()) == {"dead"}
        assert session.get_one(Delivery, "msg-a").last_error == HELD
    with lab.database.write() as session:
        again = claims.claim(session, "worker-y", "elsewhere", Slot("cpu", "cpu"), 60)
    assert again is not None and again.token.attempt == 2


def test_checkpoints_that_are_pruned_meanwhile_are_whole_or_not_there(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]
) -> None:
    claim = run(lab, layout, "runs")
    folder = layout.attempt(claim.token.job_id, 1)
    over, errors, step = threading.Event(), list[BaseException](), 8

    def train() -> None:
        nonlocal step
        try:
            while not over.is_set():
                step += 1
                fill = f"state of step {step}".encode() * 3000
                checkpoints.write(
                    folder / "checkpoints",
                    checkpoint_name(Progress(step, 0)),
                    lambda aside, fill=fill: [(aside / name).write_bytes(fill) for name in ("a.bin", "b.bin")],  # type: ignore[misc]
                )
                checkpoints.prune(folder / "checkpoints", 2)
                with (folder / "events.jsonl").open("ab") as file:
                    file.write(f'{{"step": {step}}}\n'.encode())
        except BaseException as error:
            errors.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    made: list[Snapshot] = []
    try:
        while step < 12:
            assert trainer.is_alive(), errors
        for _ in range(4):
            made.append(create(lab.database, layout, store, Options()))
    finally:
        over.set()
        trainer.join(60)
    assert not errors
    for number, snapshot in enumerate(made):
        assert list(store.damage(snapshot)) == []
        kept = {one.path: one for one in store.kept(snapshot)}
        assert not [path for path in kept if "tmp-" in path]
        settings = another(f"new-{number}", "sqlite" if lab.database.is_sqlite else "postgresql")
        restore(settings, store, snapshot.name)
        attempt = Layout(settings.root).attempt(claim.token.job_id, 1)
        found = [one for one in checkpoints.newest_first([attempt / "checkpoints"]) if one.step > 8]
        assert found and [checkpoints.fault(one.path) for one in found] == [None] * len(found)
        lines = (attempt / "events.jsonl").read_text().splitlines()
        # A step is told right after its checkpoint here.
        assert json.loads(lines[-1])["step"] >= found[0].step - 1, "events reach as far as checkpoints"


@pytest.mark.one_database
def test_what_is_damaged_is_found_and_never_put_back(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]
) -> None:
    good, bad = upload(lab, layout, b"good"), upload(lab, layout, b"bad, soon")
    made = create(lab.database, layout, store, Options())
    (kept,) = [one for one in store.kept(made) if one.path.endswith(bad)]
    store.object(kept.sha256).write_bytes(b"bad, now.")
    assert list(store.damage(made)) == [f"files/{bad}: its content has another SHA-256"]
    settings = another()
    with pytest.raises(BackupError, match="has another SHA-256; give --damaged"):
        restore(settings, store)
    assert (settings.root / RESTORING).exists()
    with pytest.raises(HalfRestored, match="did not finish"):
        Layout(settings.root).create()

    done = restore(settings, store, damaged=True)  # goes on where it was
    assert done.damaged == [f"files/{bad}: its content in the backup has another SHA-256"]
    assert content(settings.root) == {f"files/{good}": b"good"}
    assert not (settings.root / RESTORING).exists()
    Layout(settings.root).create()
    healed = create(lab.database, layout, store, Options(checksum=True))
    assert list(store.damage(healed)) == [], "the data root has it still"

    sums = store.folder(made) / "files.jsonl"
    sums.write_bytes(sums.read_bytes() + b"\n")
    with pytest.raises(BackupError, match=r"damaged: files.jsonl: its SHA-256 is another"):
        restore(another("third"), store, made.name, damaged=True)


@pytest.mark.one_database
def test_a_snapshot_that_lies_gets_no_more_than_its_users_files(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]
) -> None:
    """Sums prove what was written, not who wrote it."""
    file_id = upload(lab, layout, b"rows\n")
    made = create(lab.database, layout, store, Options())
    lines = (store.folder(made) / "files.jsonl").read_text().splitlines()

    def forged(**changes: Any) -> None:
        path = store.folder(made) / "files.jsonl"
        path.write_text("".join(json.dumps(json.loads(line) | changes) + "\n" for line in lines))
        told = store.folder(made) / "snapshot.json"
        document = json.loads(told.read_text())
        document["sums"]["files.jsonl"] = hashlib.sha256(path.read_bytes()).hexdigest()
        told.write_text(json.dumps(document))

    for name in ("a\0b", "../b", "/b", "."):
        forged(path=name)
        with pytest.raises(BackupError, match="outside the data root"):
            restore(another(f"to-{ord(name[0])}"), store, made.name)
    forged(mode=0o106777)
    settings = another("modes")
    restore(settings, store, made.name)
    assert Layout(settings.root).file(file_id).stat().st_mode & 0o7777 == 0o700


@pytest.mark.one_database
def test_a_damaged_list_of_files_stops_neither_the_next_backup_nor_loses_content(
    lab: Lab, layout: Layout, store: BackupStore
) -> None:
    upload(lab, layout, b"one")
    first, second = (create(lab.database, layout, store, Options()) for _ in range(2))
    (store.folder(second) / "files.jsonl").write_text('{"path": "fil')
    third = create(lab.database, layout, store, Options())
    assert list(store.damage(third)) == [] and third.files == first.files
    with store.writing(), pytest.raises(BackupError, match=f"{second.name} is damaged"):
        store.prune(2)
    assert len(store.names()) == 3, "nothing goes while it is not known what is needed"
    with store.writing():
        assert store.prune(1)[0] == [first.name, second.name]
    assert list(store.damage(third)) == []


@pytest.mark.one_database
def test_what_is_damaged_on_the_data_root_is_told_when_it_is_kept(lab: Lab, layout: Layout, store: BackupStore) -> None:
    rotten, gone = upload(lab, layout, b"sound"), upload(lab, layout, b"here")
    layout.file(rotten).write_bytes(b"rotts")
    layout.file(gone).unlink()
    made = create(lab.database, layout, store, Options())
    assert sorted(line.partition(":")[0] for line in made.missing) == sorted([f"files/{rotten}", f"files/{gone}"])


def test_only_into_what_is_empty_and_one_at_a_time(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings], tmp_path: Path
) -> None:
    with pytest.raises(BackupError, match="is not a backup folder"):
        restore(another("no"), store)
    upload(lab, layout, b"one")
    create(lab.database, layout, store, Options())
    taken = another("taken")
    (taken.root / "files").mkdir(parents=True)
    with pytest.raises(BackupError, match=r"is not empty \(files\)"):
        restore(taken, store)
    used = Settings(data=str(tmp_path / "fresh"), database_url=lab.database.url.render_as_string(hide_password=False))
    with pytest.raises(BackupError, match=r"is not empty|is there already"):
        restore(used, store)
    with store.writing(), pytest.raises(BackupError, match="another backup is being made"):
        create(lab.database, layout, BackupStore(store.root), Options())
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").write_text("")
    with pytest.raises(BackupError, match="not empty and no folder of backups"):
        create(lab.database, layout, BackupStore(tmp_path / "else"), Options())


def test_a_restore_that_broke_off_at_its_very_end_is_ended_by_the_same_command(
    lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]
) -> None:
    claim = run(lab, layout, "runs")
    made = create(lab.database, layout, store, Options())
    settings = another()
    settings.root.mkdir()
    (settings.root / f".{RESTORING}.77").write_text("")  # or at its very beginning
    migrated = opened(settings) if not lab.database.is_sqlite else None
    if migrated is not None:
        migrate.upgrade(migrated)  # an empty database that was migrated already is empty
        migrated.dispose()
    first = restore(settings, store).settled
    assert first.handed_back == [claim.token.job_id]
    (settings.root / RESTORING).write_text(json.dumps({"snapshot": made.name}))  # killed before it went
    assert restore(settings, store).settled == first
    assert not (settings.root / RESTORING).exists()
    with pytest.raises(BackupError, match="is not empty"):
        restore(settings, store)


@pytest.mark.one_database
def test_what_broke_off_leaves_no_half_snapshot(lab: Lab, layout: Layout, store: BackupStore) -> None:
    upload(lab, layout, b"one")
    # What a SIGKILL leaves of the very first one.
    store.objects.mkdir(parents=True)
    store.snapshots.mkdir()
    (store.root / ".eft-backup.json.77").write_text("")
    create(lab.database, layout, store, Options())
    # And at any point before the last rename.
    (store.snapshots / ".tmp-2026-11-21T190211.042Z" / "database").mkdir(parents=True)
    (store.objects / ".tmp-77").write_bytes(b"half")
    assert len(store.names()) == 1
    second = create(lab.database, layout, store, Options())
    assert store.names()[-1] == second.name
    assert not list(store.root.rglob(".tmp-*"))


@pytest.mark.one_database
def test_links_take_no_room(lab: Lab, layout: Layout, store: BackupStore, another: Callable[..., Settings]) -> None:
    file_id = upload(lab, layout, b"z" * 1000)
    claim = run(lab, layout, "runs")
    made = create(lab.database, layout, store, Options(link=True))
    kept = {one.path: store.object(one.sha256) for one in store.kept(made)}
    assert kept[f"files/{file_id}"].stat().st_ino == layout.file(file_id).stat().st_ino
    log = layout.attempt(claim.token.job_id, 1) / "log.txt"
    with log.open("ab") as file:  # it goes on growing: what was kept does not
        file.write(b"more")
    assert list(store.damage(made)) == []
    settings = another()
    restore(settings, store)
    (settings.root / "files" / file_id).write_bytes(b"changed")
    assert list(store.damage(made)) == [], "what is restored is nobody else's file"
