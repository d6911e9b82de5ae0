"""Putting a snapshot into an empty installation: files first, the database last, so that half of one is never used.

While it is at work the data root has a mark, `restoring.json`; `eft up`, the API and a worker refuse a root that has
it. A restore that broke off is begun again with the same command, and goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select, update

from box.backup import database as databases
from box.backup.beside import require_quiet, take_over
from box.backup.database import SQLITE
from box.backup.settle import RESTORED, Notices, Settled, settle
from box.backup.store import BLOCK, DATABASE, BackupError, BackupStore, KeptFile, Snapshot, sha256_of
from box.instance import AlreadyRunning, Instance
from core import private
from core.base.files import sync, write_private
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Audit, Installation
from core.jobs import installation
from core.settings import Settings
from core.storage.layout import RESTORING, Layout
from core.storage.open import open_store

ASIDE = ".restoring-"
OURS = ("up.lock", RESTORING)
MARKS = "0010"
"""The schema from which on an installation has a mark."""


@dataclass(frozen=True, slots=True)
class Restored:
    snapshot: Snapshot
    settled: Settled
    damaged: list[str]
    """What could not be put back, and was left out because that was asked for."""


def restore(
    settings: Settings,
    store: BackupStore,
    name: str | None = None,
    *,
    notices: Notices = "hold",
    damaged: bool = False,
    tell: Callable[[str], None] = lambda words: None,
) -> Restored:
    """Bring snapshot `name` (default: the newest) to the data root and database of `settings`, both empty.

    `damaged`: leave out what the backup has not got any more, instead of stopping. Raises BackupError.
    """
    store.check()
    snapshot, layout = store.read(name), Layout(settings.root)
    faults = list(store.damage(snapshot, content=False))
    broken = [line for line in faults if line.startswith(tuple(snapshot.sums))]
    if broken or (faults and not damaged):
        raise BackupError(
            f"the backup {snapshot.name} is damaged: {'; '.join((broken or faults)[:3])}"
            f"{f' and {len(faults) - 3} more' if len(faults) > 3 else ''}. Take another one (`eft backup list`)"
            + ("" if broken else ", or give --damaged to leave that out")
        )
    if (snapshot.bucket is None) is settings.is_remote:
        where = "a folder" if snapshot.bucket is None else f"{snapshot.bucket}, or a copy of it"
        raise BackupError(f"the backup {snapshot.name} is of an installation whose data root is {where}: set EFT_DATA")
    private.close(settings.root)
    settings.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        instance = Instance.take(settings.root, patience=0)
    except AlreadyRunning as error:
        raise BackupError(f"{error}") from error
    try:
        if snapshot.bucket is not None:
            return Restored(snapshot, _beside_bucket(settings, store, snapshot, notices), [])
        _begin(settings.root, snapshot)
        left_out = _files(layout, store, snapshot, damaged, tell)
        settled = _restored(settings, snapshot) or _database(settings, store, snapshot, notices)
        (settings.root / RESTORING).unlink()
        sync(settings.root)
    finally:
        os.close(instance.descriptor)
    return Restored(snapshot, settled, left_out)


def _begin(root: Path, snapshot: Snapshot) -> None:
    mark = root / RESTORING
    if mark.exists():
        begun = json.loads(mark.read_bytes())["snapshot"]
        if begun != snapshot.name:
            raise BackupError(
                f"a restore of {begun} was begun in {root}: finish it (--snapshot {begun}), or empty the folder"
            )
        return
    for left in root.glob(f".{RESTORING}.*"):  # killed while it made the mark
        left.unlink()
    others = [path.name for path in root.iterdir() if path.name not in OURS]
    if others:
        raise BackupError(
            f"the data root {root} is not empty ({', '.join(sorted(others)[:3])}): "
            "a backup goes into a new one (EFT_DATA)"
        )
    write_private(mark, json.dumps({"snapshot": snapshot.name}).encode())


def _beside_bucket(settings: Settings, store: BackupStore, snapshot: Snapshot, notices: Notices) -> Settled:
    """The database alone; then the bucket is taken over (box/backup/beside.py)."""
    bucket = open_store(settings)
    require_quiet(bucket, settings)
    settled = _begun(settings, snapshot) or _database(settings, store, snapshot, notices)
    database = Database(settings.sqlalchemy_url)
    try:
        take_over(database, bucket, f"a restore of {snapshot.name} on {settings.node}")
    finally:
        database.dispose()
    return settled


def _begun(settings: Settings, snapshot: Snapshot) -> Settled | None:
    """What an earlier try has put into the database, which is closed since; None: it has put nothing there. Raises
    BackupError where that try was of another backup, or did all that there is to do."""
    database = Database(settings.sqlalchemy_url)
    try:
        told = _told(database)
        if told is None:
            return None
        with database.read() as session:
            token = installation.closed(installation.find(session))
    finally:
        database.dispose()
    if token == "":  # nor has it been settled (`_postgresql`): what its audit tells of is an earlier restore
        return None
    name, settled, unfinished = *told, token is not None
    if unfinished and name != snapshot.name:
        raise BackupError(f"a restore of {name} was begun into this database: finish it (--snapshot {name})")
    if not unfinished and name == snapshot.name:
        raise BackupError(f"{name} was restored into this database before, to the end: nothing is left to do")
    return settled if unfinished else None


# -- files


def _files(
    layout: Layout, store: BackupStore, snapshot: Snapshot, damaged: bool, tell: Callable[[str], None]
) -> list[str]:
    for folder in (layout.files, layout.uploads, layout.models, layout.cache, layout.runs):
        folder.mkdir(mode=0o700, exist_ok=True)
    for left in layout.root.glob(f"{ASIDE}*"):
        left.unlink()
    left_out, done = [], 0
    for number, kept in enumerate(store.kept(snapshot), 1):
        target = layout.root / kept.path
        parts = Path(kept.path).parts
        if ".." in parts or target == layout.root or Path(kept.path).is_absolute() or "\0" in kept.path:
            raise BackupError(f"the backup names a file outside the data root: {kept.path[:200]!r}")
        if not _there(target, kept):
            fault = _put(store.object(kept.sha256), target, layout.root, kept)
            if fault is not None:
                left_out.append(fault)
                if not damaged:
                    raise BackupError(f"{fault}; give --damaged to leave it out, or take another backup")
        done += kept.bytes
        if number % 1000 == 0:
            tell(f"{number} of {snapshot.files} files, {done >> 20} of {snapshot.bytes >> 20} MiB")
    os.sync()  # before the database names them
    return left_out


def _there(target: Path, kept: KeptFile) -> bool:
    """From an earlier try."""
    try:
        seen = target.lstat()
    except FileNotFoundError:
        return False
    return (seen.st_size, seen.st_mtime_ns) == (kept.bytes, kept.mtime_ns) and sha256_of(target) == kept.sha256


def _put(source: Path, target: Path, root: Path, kept: KeptFile) -> str | None:
    """Copied, and its sum looked at on the way; what is wrong with it, or None. Never a link: a log goes on growing."""
    aside = root / f"{ASIDE}{os.getpid()}"
    digest = hashlib.sha256()
    try:
        with source.open("rb") as file, aside.open("wb") as copy:
            while block := file.read(BLOCK):
                digest.update(block)
                copy.write(block)
            os.fchmod(copy.fileno(), kept.mode & 0o700)  # never a bit for others, whatever the snapshot says
    except FileNotFoundError:
        return f"{kept.path}: its content is not in the backup"
    if digest.hexdigest() != kept.sha256:
        aside.unlink()
        return f"{kept.path}: its content in the backup has another SHA-256"
    os.utime(aside, ns=(kept.mtime_ns, kept.mtime_ns))
    _folder(target.parent)
    aside.replace(target)
    return None


def _folder(folder: Path) -> None:
    """Each for this user alone."""
    if not folder.exists():
        _folder(folder.parent)
        folder.mkdir(mode=0o700)


# -- the database


def _restored(settings: Settings, snapshot: Snapshot) -> Settled | None:
    """What an earlier try has done, which ended between its last step and the removal of the mark. Nothing has used the
    database since, because the mark was there."""
    database = Database(settings.sqlalchemy_url)
    try:
        told = _told(database)
    finally:
        database.dispose()
    return told[1] if told is not None and told[0] == snapshot.name else None


def _told(database: Database) -> tuple[str, Settled] | None:
    """The restore that this database came from last, as its audit has it, in the transaction that settled it."""
    if database.is_sqlite and not Path(str(database.url.database)).exists():
        return None
    if migrate.current(database) != migrate.head():
        return None
    with database.read() as session:
        query = select(Audit.target, Audit.data).where(Audit.action == RESTORED).order_by(Audit.id.desc()).limit(1)
        row = session.execute(query).one_or_none()
    return None if row is None else (row.target, Settled(list(row.data["handed_back"]), int(row.data["notices_held"])))


def _database(settings: Settings, store: BackupStore, snapshot: Snapshot, notices: Notices) -> Settled:
    folder = store.folder(snapshot) / DATABASE
    database = Database(settings.sqlalchemy_url)
    try:
        match snapshot.database, database.is_sqlite:
            case "sqlite", True:
                return _sqlite_to_sqlite(folder / SQLITE, database, snapshot, notices)
            case "sqlite", False:
                return _sqlite_to_postgresql(folder / SQLITE, settings.root, database, snapshot, notices)
            case "postgresql", False:
                return _postgresql(folder, database, snapshot, notices)
            case _:
                raise BackupError(
                    f"a backup of {snapshot.database} goes into {snapshot.database}: set EFT_DATABASE_URL to an empty "
                    "database (one of SQLite goes into PostgreSQL, too)"
                )
    finally:
        database.dispose()


def _mark(snapshot: Snapshot) -> str | None:
    """What the row of the installation says of the data root: a folder is marked by the first process that comes, a
    bucket has to be taken over first."""
    return None if snapshot.bucket is None else installation.new_closed()


def _sqlite_to_sqlite(source: Path, database: Database, snapshot: Snapshot, notices: Notices) -> Settled:
    assert database.url.database is not None
    final = Path(database.url.database)
    if final.exists():
        raise BackupError(f"{final} is there already: a backup goes into a new database (EFT_DATABASE_URL)")
    aside = final.with_name(f".{final.name}.restoring")
    settled = _settled_copy(source, aside, snapshot, notices)
    aside.rename(final)
    sync(final.parent)
    return settled


def _settled_copy(source: Path, aside: Path, snapshot: Snapshot, notices: Notices) -> Settled:
    """A copy at this version's schema, settled, in one file that is on the disk."""
    for left in (aside, Path(f"{aside}-wal"), Path(f"{aside}-shm")):
        left.unlink(missing_ok=True)
    shutil.copyfile(source, aside)
    aside.chmod(0o600)
    copy = Database(f"sqlite:///{aside}")
    try:
        migrate.upgrade(copy)
        with copy.write() as session:
            settled = settle(session, snapshot.name, snapshot.taken_at, notices, mark=_mark(snapshot))
    finally:
        copy.dispose()  # the last one to close it brings the write-ahead log into the file
    with aside.open("rb+") as file:
        os.fsync(file.fileno())
    if Path(f"{aside}-wal").exists():
        raise BackupError(f"{aside} is in use by another process")
    return settled


def _sqlite_to_postgresql(
    source: Path, root: Path, database: Database, snapshot: Snapshot, notices: Notices
) -> Settled:
    if migrate.current(database) is not None:
        databases.require_empty(database)
    aside = root / f"{ASIDE}{SQLITE}"
    settled = _settled_copy(source, aside, snapshot, notices)
    migrate.upgrade(database)
    with database.write() as session:
        databases.load_sqlite(aside, database, session)
    aside.unlink()
    return settled


def _postgresql(folder: Path, database: Database, snapshot: Snapshot, notices: Notices) -> Settled:
    """Rows, and what they must forget, in one transaction: they are all there and settled, or none is. Where the backup
    is of an older schema, the migrations' own changes to rows come in between; what breaks off there has to be emptied
    by hand."""
    if migrate.current(database) is not None:
        databases.require_empty(database)
    databases.prepare(database, snapshot.revision)
    with database.write() as session:
        databases.load_postgresql(folder, session)
        if snapshot.bucket is not None and snapshot.revision >= MARKS:  # closed also while it is migrated
            session.execute(update(Installation).values(mark=installation.CLOSED))
        if snapshot.revision == migrate.head():
            return settle(session, snapshot.name, snapshot.taken_at, notices, mark=_mark(snapshot))
    migrate.upgrade(database)
    with database.write() as session:
        return settle(session, snapshot.name, snapshot.taken_at, notices, mark=_mark(snapshot))
