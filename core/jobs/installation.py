"""One installation: its database, its data root, what its API writes. Workers are held against it before they serve.

The row is made by the migration. The data root carries a mark with the installation's id and a token that the database
has too: whoever reads the mark where it looks for the data root sees the one that the others see, and not a folder that
is empty, somebody else's, or a disk that was not mounted. The mark is made once, by whichever process comes first.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import Database, db_now
from core.db.tables import File, Installation
from core.errors import EftError
from core.spec import vocabulary
from core.storage.layout import HalfRestored
from core.storage.store import Store

MARK = "installation.json"
CLOSED = "restoring "
"""Begins the mark of a row whose restore has not finished, before the token that its data root will get."""
BROKER_KEY = "eft:installation"
"""The broker's key with the installation's id (worker/preflight/joining.py)."""
SHOWN = 3


class OtherDataRoot(EftError):
    """What EFT_DATA names is not the data root of this database."""

    code = "other_data_root"
    status = 503


@dataclass(frozen=True, slots=True)
class VersionFit:
    """Whether a worker of this version may serve an installation, and what to tell of it."""

    fit: bool
    words: str
    """Empty where there is nothing to tell."""


def find(session: Session) -> Installation:
    return session.execute(select(Installation)).scalar_one()


# -- the data root


def check_data_root(database: Database, store: Store, who: str) -> str:
    """Read the mark, or write it if it is missing; returns the installation's id. `who`: for readers of the mark
    somewhere else, e.g. `the API on box-1`. Raises OtherDataRoot, HalfRestored, StoreAway."""
    while True:
        with database.read() as session:
            row = find(session)
        if closed(row) is not None:
            raise HalfRestored("a restore into this database did not finish: run `eft restore` again to continue it")
        mark = _read(store)
        if mark is not None and mark.get("installation") != row.id:
            raise OtherDataRoot(
                f"the data root {store.where} belongs to another installation ({mark.get('installation')}, marked "
                f"by {mark.get('by')}); this database is that of {row.id}. EFT_DATA or EFT_DATABASE_URL names the "
                "wrong one; if both are right: `eft adopt`"
            )
        if row.mark is None:
            _look_for_newest(database, store)
            _mark(database, store, row.id, mark, who)
            continue
        if mark is None:
            raise OtherDataRoot(
                f"the data root {store.where} is not that of this installation: it has no {MARK}, which "
                f"{row.marked_by} has made there. Is it mounted? Set EFT_DATA to the folder (or bucket) that all "
                "boxes share; if the data root has moved, move its files too; to make this one the data root from "
                "now on: `eft adopt`"
            )
        if mark.get("token") != row.mark:
            raise OtherDataRoot(
                f"the data root {store.where} is a copy or another one: its {MARK} is not the one that {row.marked_by} "
                "has made. Set EFT_DATA to the one that all boxes share; to make this one the data root from now on: "
                "`eft adopt`"
            )
        return row.id


def adopt(database: Database, store: Store, who: str) -> str:
    """Let what EFT_DATA names be the data root of this installation from now on, whatever was it before; its id. For
    people who have moved it, or have lost it. Processes that run keep what they have until they are started again.
    Where it breaks off, nothing starts until it is done again. Raises HalfRestored, StoreAway."""
    with database.read() as session:
        row = find(session)
    if closed(row) is not None:
        raise HalfRestored("a restore into this database did not finish: run `eft restore` again to continue it")
    token = secrets.token_hex(16)
    write_mark(store, row.id, token, who)
    open_to(database, store, row.id, token, who)
    return row.id


def write_mark(store: Store, installation: str, token: str, who: str) -> None:
    """Every process of eft started on this data root from now on must know the token."""
    store.write(MARK, _content(installation, token, who))


def open_to(database: Database, store: Store, installation: str, token: str, who: str) -> None:
    """The data root with this token is the installation's."""
    values = {"mark": token, "marked_at": db_now(), "marked_by": f"{who} in {store.where}"}
    with database.write() as session:
        session.execute(update(Installation).where(Installation.id == installation).values(**values))


def new_closed() -> str:
    """A mark that no data root has, for a database that is not to be used yet."""
    return CLOSED + secrets.token_hex(16)


def closed(row: Installation) -> str | None:
    """The token that the data root will get, of a row that is closed; None: it is open."""
    return row.mark.removeprefix(CLOSED) if row.mark is not None and row.mark.startswith(CLOSED) else None


def _mark(database: Database, store: Store, installation: str, mark: dict[str, Any] | None, who: str) -> None:
    """Two may come at once, in one folder or in two: one file wins, then one row."""
    if mark is None:
        content = _content(installation, secrets.token_hex(16), who)
        store.create(MARK, content)
        mark = _read(store)
    if mark is None or not isinstance(mark.get("token"), str):
        raise OtherDataRoot(f"the data root {store.where} does not give back what was written to it ({MARK})")
    with database.write() as session:
        unmarked = update(Installation).where(Installation.id == installation, Installation.mark.is_(None))
        by = f"{mark.get('by')} in {store.where}"
        session.execute(unmarked.values(mark=mark["token"], marked_at=db_now(), marked_by=by))


def _read(store: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(store.read(MARK))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OtherDataRoot(f"{MARK} of the data root {store.where} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _content(installation: str, token: str, who: str) -> bytes:
    about = {"installation": installation, "token": token, "by": who, "made": time.strftime("%FT%TZ", time.gmtime())}
    return json.dumps(about, indent=1).encode() + b"\n"


def _look_for_newest(database: Database, store: Store) -> None:
    """Check that a data root without a mark has the newest file, if there are any. Raises OtherDataRoot."""
    with database.read() as session:
        newest = session.execute(select(File.id).order_by(File.id.desc()).limit(1)).scalar_one_or_none()
    if newest is not None and store.size(f"files/{newest}") is None:
        raise OtherDataRoot(
            f"file {newest}, which the API has stored, is not in the data root {store.where}: this node uses another "
            "disk. Share one data root among all nodes, or point EFT_DATA at it"
        )


# -- versions


def announce(database: Database, version: str) -> None:
    """The API writes jobs of these words from now on."""
    digest = vocabulary.digest()
    with database.read() as session:
        row = session.execute(select(Installation.version, Installation.words_sha256)).one()
    if (row.version, row.words_sha256) == (version, digest):
        return  # the usual case, and it writes nothing
    with database.write() as session:
        values = {"version": version, "words": sorted(vocabulary.words()), "words_sha256": digest}
        session.execute(update(Installation).values(**values))


def standing(database: Database, version: str) -> VersionFit:
    """Whether a worker of this version and vocabulary may serve. A newer one may, since it knows every word of the API;
    an older one may as long as it knows every word that the API writes into jobs."""
    with database.read() as session:
        theirs = session.execute(select(Installation.version, Installation.words_sha256)).one()
        if theirs.version is None:
            return VersionFit(True, "")  # no API has been started yet
        if theirs.words_sha256 == vocabulary.digest():
            if theirs.version == version:
                return VersionFit(True, "")
            return VersionFit(True, f"this worker is eft {version}, the API {theirs.version}: both read the same jobs")
        words = frozenset(session.execute(select(Installation.words)).scalar_one() or ())
    unknown = sorted(words - vocabulary.words())
    if not unknown:
        return VersionFit(
            True,
            f"this worker (eft {version}) is newer than the API ({theirs.version}), and can read all its jobs",
        )
    named = ", ".join(f"`{word}`" for word in unknown[:SHOWN]) + (" …" if len(unknown) > SHOWN else "")
    return VersionFit(
        False,
        f"this worker (eft {version}) is older than the API ({theirs.version}): jobs say {named} there, which it "
        "cannot read. Bring this box to the API's version; where boxes are upgraded one by one, the API comes last",
    )
