"""`eft restore`: put a backup into an empty installation."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from box.backup.restore import Restored, restore
from box.backup.store import BackupStore
from core import command, private
from core.errors import EftError
from core.settings import Settings, read_settings

EPILOG = """\
examples:
  EFT_DATA=/srv/eft eft restore /mnt/backup/eft          the newest backup
  eft restore /mnt/backup/eft --data /srv/eft --snapshot 2026-11-21T190211.042Z
  eft restore /mnt/backup/eft --data /srv/eft --database-url postgresql+psycopg://eft:…@db/eft

What ran goes on from its newest checkpoint in the backup. Keys work as they did then: revoke again what was revoked
since.
exit status: 0 done; 1 not done, and begun again by the same command.
"""


def main() -> int:
    private.umask()
    parser = argparse.ArgumentParser(
        prog="eft restore",
        description="Put a backup into an empty data root and an empty database.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="DEST", help="folder of backups (`eft backup list DEST`)")
    parser.add_argument("--snapshot", metavar="NAME", help="which backup (default: the newest)")
    parser.add_argument("--data", type=Path, metavar="PATH", help="the new data root (EFT_DATA)")
    parser.add_argument("--database-url", metavar="URL", help="the new database (EFT_DATABASE_URL)")
    parser.add_argument(
        "--notices",
        choices=["hold", "send"],
        default="hold",
        help="pending webhook notifications: keep as dead letters (hold, the default), or send (send)",
    )
    parser.add_argument("--damaged", action="store_true", help="skip what the backup has lost, and list it")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    given = parser.parse_args()
    for name, value in (("DATA", given.data), ("DATABASE_URL", given.database_url)):
        if value is not None:
            os.environ[f"EFT_{name}"] = str(value)
    try:
        settings = read_settings()
        done = restore(
            settings,
            BackupStore(given.source),
            given.snapshot,
            notices=given.notices,
            damaged=given.damaged,
            tell=lambda words: print(words, file=sys.stderr, flush=True),
        )
    except EftError as error:  # of the backup, or of a bucket that is away
        print(f"eft restore: {error.message}", file=sys.stderr)
        return 1
    except SQLAlchemyError as error:
        print(f"eft restore: {command.database_words(error)}", file=sys.stderr)
        return 1
    except (OSError, sqlite3.Error, psycopg.Error) as error:
        print(f"eft restore: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_document(done), indent=1) if given.json else _words(done, settings))
    return 0


def _document(done: Restored) -> dict[str, object]:
    return {
        "snapshot": done.snapshot.name,
        "taken_at": done.snapshot.taken_at,
        "files": done.snapshot.files,
        **asdict(done.settled),
        "damaged": done.damaged,
        "missing": done.snapshot.missing,
    }


def _words(done: Restored, settings: Settings) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(done.snapshot.taken_at))
    lines = [
        f"restored {done.snapshot.name}, the state of {when}, into {settings.root}",
        f"  {done.snapshot.files} files; {len(done.settled.handed_back)} job(s) that ran continue from a checkpoint",
    ]
    if done.settled.held:
        lines.append(
            f"  {done.settled.held} notice(s) that were waiting are dead letters now: `eft webhooks` resends them"
        )
    lines += [f"  left out: {line}" for line in done.damaged]
    lines += [f"  was missing when the backup was made: {line}" for line in done.snapshot.missing]
    lines.append("  keys work as they did then: revoke again what was revoked since. `eft up` starts it.")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run("eft restore", main)
