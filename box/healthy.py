"""Is the API, or this box's worker, at work? `python -m box.healthy api|worker [--gpu]`: status 0, or 1 and why not.

What containers and service managers ask of time to time, in the environment of the service itself. The API is asked
over HTTP, as people would; a worker by what it last told the database, which is what the queue goes by.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core import command
from core.db.engine import Database, db_now
from core.db.tables import Node
from core.settings import Settings, read_settings

SECONDS = 5.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- compared, not bound


def api(settings: Settings) -> tuple[bool, str]:
    """Whether the API on this box answers and has what it needs; in words, what is missing."""
    host = ANY_ADDRESS.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, settings.port, timeout=SECONDS)
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        body: dict[str, Any] = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return False, f"no answer from {host} port {settings.port}: {error or type(error).__name__}"
    finally:
        connection.close()
    checks: dict[str, Any] = body.get("checks", {})
    wrong = [f"{name}: {check['detail']}" for name, check in checks.items() if not check["ok"]]
    return reply.status == 200, "; ".join(wrong) or str(body.get("status", reply.status))


def worker(settings: Settings, gpu: bool = False) -> tuple[bool, str]:
    """Whether the worker under this node's name was heard of within a lease, and, with `gpu`, serves one: a container
    that was not given its devices trains on the CPU, without a visible reason."""
    database = Database(settings.sqlalchemy_url)
    try:
        with database.read() as session:
            row = session.execute(
                select(db_now() - Node.heartbeat_at, Node.slots).where(Node.name == settings.node)
            ).one_or_none()
    except SQLAlchemyError as error:
        return False, f"the database cannot be asked: {type(error).__name__}"
    finally:
        database.dispose()
    if row is None:
        return False, f"no worker has served node {settings.node} yet"
    silent, slots = row
    if silent > settings.lease_seconds:
        return False, f"the worker of {settings.node} was last heard of {silent:.0f} s ago"
    if gpu and not any(slot["kind"] == "gpu" for slot in slots):
        return False, f"the worker of {settings.node} serves no GPU; `python -m box.doctor` beside it says why"
    return True, f"{settings.node}: {', '.join(slot['id'] for slot in slots)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m box.healthy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", choices=["api", "worker"])
    parser.add_argument("--gpu", action="store_true", help="of a worker: at least one slot has to be a GPU")
    asked = parser.parse_args()
    settings = read_settings()
    ok, words = api(settings) if asked.which == "api" else worker(settings, asked.gpu)
    print(words, file=sys.stdout if ok else sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    command.run("python -m box.healthy", main)
