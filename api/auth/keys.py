"""Make, list and revoke API keys on the box itself, where no key is needed:
`python -m api.auth.keys create --project lab --user ada`, or `eft keys local create …`. Elsewhere: `eft keys`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session

from api.auth import families, people, service
from api.auth.policy import Right, Role, Scope, widest
from core import command, private
from core.base.files import write_private
from core.db.engine import Database, db_now
from core.db.tables import Project, User
from core.errors import Conflict, EftError
from core.jobs.policies import audit
from core.settings import settings


def create(
    database: Database,
    *,
    project: str,
    user: str,
    name: str,
    if_none: Path | None = None,
    role: Role | None = None,
    scope: Scope | None = None,
    days: float | None = None,
    rights: Sequence[Right] | None = None,
    box_admin: bool = False,
) -> str | None:
    """The new key; None when `if_none` is given and there is a key already.

    User and project are made where they are new. `role` None leaves a member what they are; somebody new becomes
    admin of a project that has none, member of another. While the box has no admin, the user becomes it.

    `if_none` is a file that gets the key before the database does: a crash in between leaves a file with a key that
    does not work, which the next call replaces, and never an installation whose only key nobody has seen.
    """
    for attempt in range(2):
        try:
            with database.write() as session:
                if if_none is not None and service.any_key(session):
                    return None
                key = _create(session, project, user, name, role, scope, days, rights, box_admin)
                if if_none is not None:
                    write_private(if_none, f"{key}\n".encode())
                return key
        except (IntegrityError, Conflict):  # somebody made the same user or project at this moment
            if attempt:
                raise
    raise AssertionError("unreachable")


def _create(
    session: Session,
    project: str,
    user: str,
    name: str,
    role: Role | None,
    scope: Scope | None,
    days: float | None,
    rights: Sequence[Right] | None,
    box_admin: bool,
) -> str:
    whose = session.execute(select(User).where(User.name == user)).scalar_one_or_none()
    whose = whose or people.add_user(session, None, user)
    where = session.execute(select(Project).where(Project.name == project)).scalar_one_or_none()
    where = where or people.add_project(session, None, project)
    if box_admin or not people.admins(session, None):
        people.change_user(session, None, whose, box_admin=True, disabled=False)
    if whose.disabled_at is not None:
        raise Conflict(
            f"`{user}` is disabled: `--box-admin` makes them an admin of the box again", code="user_disabled"
        )
    has = people.role(session, whose.id, where.id)
    given = role or has or (Role.MEMBER if people.admins(session, where.id) else Role.ADMIN)
    people.set_member(session, None, where.id, whose, given)
    expires_at = None
    longest = settings().key_longest_days
    if longest and days is not None and days > longest:
        raise Conflict(f"a key lives at most {longest:g} days here (EFT_KEY_LONGEST_DAYS)", code="invalid_value")
    days = days or longest or None
    if days is not None:
        expires_at = float(session.execute(select(db_now() + days * 86400.0)).scalar_one())
    if rights is None:  # as over HTTP: one without a scope is a person's
        rights = list(Right) if scope is None else []
    scope = scope or widest(given, whose.box_admin)
    key, row = service.create(
        session, user_id=whose.id, project_id=where.id, name=name, scope=scope, expires_at=expires_at, rights=rights
    )
    told = {
        "name": name,
        "prefix": row.prefix,
        "user": user,
        "scope": scope.value,
        "rights": row.rights,
        "expires_at": expires_at,
    }
    audit.record(session, None, "key.create", row.id, told, project_id=where.id)
    return key


def _name(text: str) -> str:
    if not (0 < len(text) <= 100 and text.isprintable() and text == text.strip()):
        raise argparse.ArgumentTypeError("a name has 1 to 100 printable characters")
    return text


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError("from the next moment to a hundred years")
    return days


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api.auth.keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("create", help="create a key and print it once")
    make.add_argument("--project", required=True, type=_name, help="what its jobs and files belong to; made when new")
    make.add_argument("--user", required=True, type=_name, help="who answers for them; made when new")
    make.add_argument("--name", default="key", type=_name, help="to tell keys apart")
    make.add_argument("--if-none", metavar="FILE", type=Path, help="only if there is no key yet; kept in FILE, too")
    roles, scopes = [role.value for role in Role], [scope.value for scope in Scope]
    make.add_argument("--role", choices=roles, help="of the user in the project; default: as they are")
    make.add_argument("--scope", choices=scopes, help="of the key; default: all that its user may")
    make.add_argument(
        "--right",
        action="append",
        choices=[right.value for right in Right],
        help="with keys; may be given several times; default: both without --scope, none with it",
    )
    make.add_argument("--days", type=_days, help="it expires after so many; default: EFT_KEY_LONGEST_DAYS")
    make.add_argument("--box-admin", action="store_true", help="the user looks after the box, too")
    commands.add_parser("list", help="prefix, name, user and project of all keys")
    end = commands.add_parser("revoke", help="revoke a key at once, with all keys that it created")
    end.add_argument("prefix", help="the 8 characters behind eft_")
    end.add_argument("--alone", action="store_true", help="leave those that were made with it, and its successors")
    return parser


def main(arguments: list[str] | None = None) -> int:
    private.umask()
    asked = _parser().parse_args(arguments)
    database = Database(settings().sqlalchemy_url)
    try:
        match asked.command:
            case "create":
                key = create(
                    database,
                    project=asked.project,
                    user=asked.user,
                    name=asked.name,
                    if_none=asked.if_none,
                    role=None if asked.role is None else Role(asked.role),
                    scope=None if asked.scope is None else Scope(asked.scope),
                    days=asked.days,
                    rights=None if asked.right is None else [Right(right) for right in asked.right],
                    box_admin=asked.box_admin,
                )
                if key is None:
                    print("there is a key already; nothing made", file=sys.stderr)
                else:
                    print(key)
            case "list":
                with database.read() as session:
                    for row, user, project in service.listing(session):
                        made = datetime.fromtimestamp(row.created_at, UTC).strftime("%Y-%m-%d %H:%M")
                        over = row.expires_at is not None and row.expires_at <= time.time()
                        state = "revoked" if row.revoked_at is not None else "expired" if over else "works"
                        print(f"{row.prefix}  {made}  {state:<7}  {row.scope:<5}  {user}  {project}  {row.name}")
            case "revoke":
                with database.write() as session:
                    key_id = service.by_prefix(session, asked.prefix)
                    others = [] if key_id is None else families.end(session, None, key_id, alone=asked.alone)
                if key_id is None:
                    print(f"no working key has the prefix {asked.prefix!r}; `list` shows them", file=sys.stderr)
                    return 1
                for other in others:
                    print(f"also revoked: {other}")
        return 0
    except EftError as error:
        print(error.message, file=sys.stderr)
        return 1
    except (OperationalError, ProgrammingError) as error:
        print(
            f"the database does not answer or has no tables yet (`python -m core.db.migrate`): {error.orig}; "
            "see EFT_DATA and EFT_DATABASE_URL",
            file=sys.stderr,
        )
        return 1
    finally:
        database.dispose()


if __name__ == "__main__":
    command.run("eft keys local", main)
