"""`eft backup`: keep database and data root, while jobs run; list, verify and prune what is kept."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from box.backup.create import Options, create
from box.backup.store import BackupError, BackupStore, Snapshot
from box.present import absent
from core import command, private
from core.db.engine import Database
from core.settings import read_settings
from core.storage.layout import Layout

EPILOG = """\
examples:
  eft backup create /mnt/backup/eft            back up the installation of EFT_DATA and EFT_DATABASE_URL
  eft backup create /mnt/backup/eft --no-models    models are downloaded again after a restore
  eft backup list /mnt/backup/eft
  eft backup verify /mnt/backup/eft            read every byte of the newest backup
  eft backup prune /mnt/backup/eft --keep 14
  eft restore /mnt/backup/eft                  into an empty EFT_DATA and an empty database

exit status: 0 done; 1 not done, or damaged: the message says what; 3 done, but something that the database names was
missing or damaged on the data root. A backup holds everybody's data, hashes of keys, and the secrets of webhooks: keep
it as you keep the data root.
"""


def main() -> int:
    private.umask()
    parser = argparse.ArgumentParser(
        prog="eft backup",
        description="Back up database and data root while jobs run. The second backup brings only what is new.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="create|list|verify|prune")
    new = verbs.add_parser("create", help="create a backup", description="Create a backup while jobs run.")
    new.add_argument("--no-models", action="store_true", help="leave prepared models out; they are fetched again")
    new.add_argument("--link", action="store_true", help="hard links instead of copies, where DEST is on the same disk")
    new.add_argument("--checksum", action="store_true", help="read files again although size and time are the same")
    shown = verbs.add_parser("list", help="list backups", description="List the complete backups, oldest first.")
    check = verbs.add_parser("verify", help="verify a backup", description="Verify a backup against its SHA-256 sums.")
    check.add_argument("--snapshot", metavar="NAME", help="which one (default: the newest)")
    check.add_argument("--quick", action="store_true", help="only look whether everything is there in its size")
    old = verbs.add_parser("prune", help="remove old backups", description="Remove all but the newest backups.")
    old.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay, at least 1")
    for verb in (new, shown, check, old):
        verb.add_argument("dest", type=Path, metavar="DEST", help="folder of backups; made where there is none")
        verb.add_argument("--json", action="store_true", help="JSON instead of text")
    given = parser.parse_args()
    if given.verb == "prune" and given.keep < 1:
        parser.error("--keep: at least 1 stays")
    try:
        return _run(given)
    except BackupError as error:
        print(f"eft backup: {error.message}", file=sys.stderr)
    except SQLAlchemyError as error:
        print(f"eft backup: {command.database_words(error)}", file=sys.stderr)
    except (OSError, sqlite3.Error, psycopg.Error) as error:
        print(f"eft backup: {error}", file=sys.stderr)
    return 1


def _run(given: argparse.Namespace) -> int:
    store = BackupStore(given.dest)
    match given.verb:
        case "create":
            return _create(store, given)
        case "list":
            store.check()
            found = [store.read(name) for name in store.names()]
            _say(given.json, [_short(one) for one in found], [_words(one) for one in found] or ["none yet"])
            return 0
        case "verify":
            store.check()
            one = store.read(given.snapshot)
            faults = list(store.damage(one, content=not given.quick))
            told = faults or [f"{one.name}: {one.files} files, {_size(one.bytes)}: all there"]
            _say(given.json, {"name": one.name, "ok": not faults, "faults": faults}, told)
            return 1 if faults else 0
        case _:
            store.check()
            with store.writing():
                gone, freed = store.prune(given.keep)
            _say(given.json, {"removed": gone, "bytes": freed}, [f"removed {len(gone)} backup(s), {_size(freed)}"])
            return 0


def _create(store: BackupStore, given: argparse.Namespace) -> int:
    settings = read_settings()
    root, bucket = settings.root, settings.data if settings.is_remote else None
    if store.root.resolve().is_relative_to(root.resolve()):
        raise BackupError(f"{store.root} is inside the data root {root}: it would be lost with it, and keep itself")
    if (why := absent(settings)) is not None:
        raise BackupError(why)
    database = Database(settings.sqlalchemy_url)
    try:
        options = Options(not given.no_models, bucket, given.link, given.checksum)
        made = create(database, Layout(root), store, options)
    finally:
        database.dispose()
    _say(given.json, _short(made), [_words(made), *(f"  missing: {line}" for line in made.missing)])
    return 3 if made.missing else 0


def _short(snapshot: Snapshot) -> dict[str, object]:
    return {name: value for name, value in asdict(snapshot).items() if name != "sums"}


def _words(one: Snapshot) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(one.taken_at))
    return (
        f"{one.name}  of {when}: {one.files} files, {_size(one.bytes)} ({_size(one.brought)} new), {one.database} "
        f"schema {one.revision}, eft {one.version}{'' if one.models else ', without models'}"
        f"{'' if one.bucket is None else f'; {one.bucket} keeps its own content'}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _say(as_json: bool, document: object, lines: list[str]) -> None:
    print(json.dumps(document, indent=1) if as_json else "\n".join(lines))


if __name__ == "__main__":
    command.run("eft backup", main)
