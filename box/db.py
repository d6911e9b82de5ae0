"""`eft db`: where the database's schema stands, and bringing it forward while jobs run (docs/operations.md)."""

from __future__ import annotations

import argparse
import json

from sqlalchemy import select

from core import command, private
from core.db import migrate
from core.db.engine import Database, db_now
from core.db.tables import Job, Node
from core.jobs.base.states import LEASED
from core.settings import read_settings

EPILOG = """\
examples:
  eft db status          before an upgrade: running processes and pending migrations
  eft db upgrade         upgrade the schema; workers of the previous version continue

exit status: 0 this version may use the database (status), or it was brought forward (upgrade); 1 not.
"""


def main() -> int:
    private.umask()
    parser = argparse.ArgumentParser(
        prog="eft db",
        description="The database's schema: where it stands, and bringing it forward while jobs run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="status|upgrade")
    status = verbs.add_parser(
        "status", help="show the schema", description="Show the state of the schema without changing it."
    )
    status.add_argument("--json", action="store_true", help="JSON instead of text")
    verbs.add_parser(
        "upgrade", help="upgrade the schema", description="Run the missing migrations, in one transaction."
    )
    given = parser.parse_args()
    database = Database(read_settings().sqlalchemy_url)
    try:
        return _status(database, given.json) if given.verb == "status" else migrate.bring_forward()
    finally:
        database.dispose()


def _status(database: Database, as_json: bool) -> int:
    standing = migrate.standing(database)
    missing, found = [], False
    for script in migrate.history():
        if found or standing.current is None:
            missing.append({"revision": script.revision, "what": (script.doc or "").splitlines()[0]})
        found = found or script.revision == standing.current
    running, nodes = _at_work(database) if standing.current is not None and (standing.fit or missing) else (0, [])
    if as_json:
        told = {"current": standing.current, "head": standing.head, "fit": standing.fit, "newer": standing.newer}
        print(json.dumps({**told, "missing": missing, "running": running, "nodes": nodes}, indent=1))
        return 0 if standing.fit else 1
    print(f"schema: {standing.words if standing.current != standing.head else f'{standing.head}, up to date'}")
    for one in missing:
        print(f"  to come: {one['revision']}  {one['what']}")
    for node in nodes:
        print(f"  node {node['name']}: eft {node['version']}")
    print(f"  {running} job(s) held by workers; they continue during an upgrade")
    return 0 if standing.fit else 1


def _at_work(database: Database) -> tuple[int, list[dict[str, str]]]:
    """Jobs that workers hold, and the nodes heard of in the last five minutes; columns that every revision has."""
    with database.read() as session:
        running = len(session.execute(select(Job.id).where(Job.status.in_(LEASED))).all())
        recent = select(Node.name, Node.version).where(Node.heartbeat_at > db_now() - 300.0).order_by(Node.name)
        return running, [{"name": name, "version": version} for name, version in session.execute(recent)]


if __name__ == "__main__":
    command.run("eft db", main)
