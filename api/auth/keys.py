"""Make, list and revoke API keys: `python -m api.auth.keys create --project lab --user ada`."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from api.auth import service
from core.db.engine import Database
from core.settings import settings
from core.storage.layout import fsync_folder


def create(database: Database, *, project: str, user: str, name: str, if_none: Path | None = None) -> str | None:
    """The new key; None when `if_none` is given and there is a key already.

    `if_none` is a file that gets the key before the database does: a crash in between leaves a file with a key that
    does not work, which the next call replaces, and never an installation whose only key nobody has seen.
    """
    for attempt in range(2):
        try:
            with database.write() as session:
                if if_none is not None and service.any_key(session):
                    return None
                key = service.create(session, project=project, user=user, name=name)
                if if_none is not None:
                    _keep(if_none, key)
                return key
        except IntegrityError:  # somebody made the same user or project at this moment
            if attempt:
                raise
    raise AssertionError("unreachable")


def _keep(path: Path, key: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    fsync_folder(path.parent)


def _name(text: str) -> str:
    if not (0 < len(text) <= 100 and text.isprintable() and text == text.strip()):
        raise argparse.ArgumentTypeError("a name has 1 to 100 printable characters")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api.auth.keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("create", help="make a key and print it, this once")
    make.add_argument("--project", required=True, type=_name, help="what its jobs and files belong to; made when new")
    make.add_argument("--user", required=True, type=_name, help="who answers for them; made when new")
    make.add_argument("--name", default="key", type=_name, help="to tell keys apart")
    make.add_argument("--if-none", metavar="FILE", type=Path, help="only if there is no key yet; kept in FILE, too")
    commands.add_parser("list", help="prefix, name, user and project of all keys")
    end = commands.add_parser("revoke", help="a key stops working at once")
    end.add_argument("prefix", help="the 8 characters behind eft_")
    return parser


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    database = Database(settings().sqlalchemy_url)
    try:
        match asked.command:
            case "create":
                key = create(database, project=asked.project, user=asked.user, name=asked.name, if_none=asked.if_none)
                if key is None:
                    print("there is a key already; nothing made", file=sys.stderr)
                else:
                    print(key)
            case "list":
                with database.read() as session:
                    for row, user, project in service.listing(session):
                        made = datetime.fromtimestamp(row.created_at, UTC).strftime("%Y-%m-%d %H:%M")
                        state = "revoked" if row.revoked_at is not None else "works"
                        print(f"{row.prefix}  {made}  {state:<7}  {user}  {project}  {row.name}")
            case "revoke":
                with database.write() as session:
                    found = service.revoke(session, asked.prefix)
                if not found:
                    print(f"no working key has the prefix {asked.prefix!r}; `list` shows them", file=sys.stderr)
                    return 1
        return 0
    except (OperationalError, ProgrammingError) as error:
        print(
            f"the database does not answer or has no tables yet (`python -m core.db.migrate`): {error.orig}",
            file=sys.stderr,
        )
        return 1
    finally:
        database.dispose()


if __name__ == "__main__":
    sys.exit(main())
