"""`eft adopt`: what EFT_DATA names is the data root of EFT_DATABASE_URL from now on.

API and workers refuse a data root that is not the one of their database: another folder, a copy, a disk that is not
mounted. After the data root has been moved or lost on purpose, this says so. Start API and workers again afterwards.
"""

from __future__ import annotations

import argparse
import sys

import redis

from core import command, private
from core.db import migrate
from core.db.engine import Database
from core.jobs import installation
from core.settings import settings
from core.storage.open import open_store

EPILOG = """\
exit status:
  0  done, or already declared
  1  the database or the data root cannot be used; nothing was changed

example:
  EFT_DATA=/srv/new/eft EFT_DATABASE_URL=postgresql+psycopg://… eft adopt
"""


def main() -> int:
    private.umask()
    parser = argparse.ArgumentParser(
        prog="eft adopt",
        description="What EFT_DATA names is the data root of EFT_DATABASE_URL from now on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    database = Database(settings().sqlalchemy_url)
    try:
        standing = migrate.standing(database)
        if not standing.fit:
            print(f"eft adopt: {standing.words}", file=sys.stderr)
            return 1
        store = open_store(settings())
        name = installation.adopt(database, store, f"`eft adopt` on {settings().node}")
        broker = _tell_broker(name)
    finally:
        database.dispose()
    print(f"{store.where} is the data root of {name} from now on{broker}; start API and workers again")
    return 0


def _tell_broker(name: str) -> str:
    """The broker may know another installation, if the database is a new one."""
    url = settings().celery_broker_url.replace("redis+socket://", "unix://", 1)
    try:
        with redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
            client.set(installation.BROKER_KEY, name)
    except (redis.RedisError, ValueError, OSError):
        return " (the broker does not answer, and was not updated)" if settings().broker_url else ""
    return ""


if __name__ == "__main__":
    command.run("eft adopt", main)
