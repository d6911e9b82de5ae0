"""`eft doctor`: what this box has, what is wrong with it, and what to do about it.

For people, or as one JSON object with --json. Exit status 0: jobs can run here; 1: something stops them. Nothing is
changed and nothing is started but the drivers' own programs; the card itself is not touched, since nobody here imports
torch. `--record FILE` writes what is found of this machine as a file that can be sent in (docs/hardware.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from box.doctor import disk, gpus, software, variables
from box.doctor.report import Report
from box.present import absent
from core import __version__, command, health, private
from core.db import migrate
from core.db.engine import Database
from core.hardware import installed
from core.hardware.record import record
from core.hardware.recording import render
from core.hardware.sources import tools
from core.jobs import installation
from core.sandbox.sandbox import why_not
from core.settings import Settings, SettingsError, read_settings
from core.storage.layout import Layout
from core.storage.open import open_store
from core.storage.store import StoreAway
from core.tools import ToolSet, place

PART_SECONDS = 120.0
"""No part of the examination may take longer: a database behind a dead network, a driver that hangs."""


def examine(environ: Mapping[str, str] = os.environ, seconds: float = tools.SECONDS) -> Report:
    """Look at everything. Whatever goes wrong in one part is a finding, and the others are looked at all the same.
    `seconds`: what each of the drivers' programs may take."""
    report = Report()
    settings = _settings(report)
    parts: list[tuple[str, Callable[[Report], None]]] = [("software", _software)]
    if settings is None:
        variables.unknown(report, environ)
    else:
        parts += [
            ("settings", lambda part: variables.look(part, settings, environ)),
            ("gpus", lambda part: gpus.look(part, settings, environ, seconds)),
            ("data", lambda part: _data(part, settings)),
            ("database", lambda part: _database(part, settings)),
            ("disk", lambda part: disk.look(part, settings)),
            ("exports", lambda part: _exports(part, settings)),
            ("sandbox", _sandbox),
            ("broker", lambda part: _broker(part, settings)),
        ]
    for what, look in parts:
        _examine(report, what, look)
    return report


def _examine(report: Report, what: str, look: Callable[[Report], None]) -> None:
    """One part, in a thread of its own that is left behind when it does not end."""
    part = Report(versions=report.versions)

    def run() -> None:
        try:
            look(part)
        except Exception as error:  # a doctor that falls ill is of no use: the fault itself is what to tell
            part.add("problem", what, f"could not be examined: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=f"eft-doctor-{what}", daemon=True)
    thread.start()
    thread.join(PART_SECONDS)
    if thread.is_alive():
        report.add("problem", what, f"did not answer within {PART_SECONDS:.0f} s")
        return
    report.versions = part.versions
    report.gpus += part.gpus
    report.determinism |= part.determinism
    report.findings += part.findings


def _settings(report: Report) -> Settings | None:
    try:
        return read_settings()
    except SettingsError as error:
        for fault in error.faults:
            report.add("problem", "settings", f"{fault} (docs/settings.md has them all)")
        return None


def _software(report: Report) -> None:
    report.versions = {"eft": __version__, **software.versions(), **installed.libraries(), **software.drivers()}
    missing = [name for name in software.NEEDED if report.versions[name] == "absent"]
    if missing:
        report.add("problem", "software", f"not installed: {', '.join(missing)}; a worker needs them (`make install`)")


# --- what the service stands on --------------------------------------------------------------------------


def _data(report: Report, settings: Settings) -> None:
    root = settings.root
    if settings.is_remote:
        try:
            open_store(settings).size(installation.MARK)
            report.add("ok", "data", f"{settings.data}: answers; this box works in {root} (EFT_WORK)")
        except StoreAway as error:
            report.add("problem", "data", error.message)
    if not root.exists():
        parent = next(folder for folder in root.parents if folder.exists())
        if parent.is_dir() and os.access(parent, os.W_OK):
            report.add("note", "data", absent(settings) or f"{root} is not there")
        else:
            report.add("problem", "data", f"{root} is not there, and nothing can be made in {parent} (EFT_DATA)")
        return
    if not root.is_dir():
        report.add("problem", "data", f"{root} is not a folder (EFT_DATA)")
        return
    check = health.data(root, settings.min_free_bytes)
    report.add("ok" if check.ok else "problem", "data", f"{root}: {check.detail}")
    mode = root.stat().st_mode & 0o777
    if mode & private.OTHERS:
        report.add("note", "data", f"{root} is open to others on this box (mode {mode:o}); the next start closes it")


def _sandbox(report: Report) -> None:
    """Whether code of users can be run here (docs/security.md): a sandbox is started, and runs a line."""
    if (why := why_not()) is None:
        report.add("ok", "sandbox", "rewards that are code of users can be run")
    else:
        report.add("note", "sandbox", f"jobs whose rewards are code of users fail here: {why}")


def _exports(report: Report, settings: Settings) -> None:
    """Whether libraries that exports need are there (docs/exports.md)."""
    if not settings.root.is_dir():
        return
    cache = Layout(settings.root).cache
    for name in get_args(ToolSet):
        folder = place(name, cache)
        if folder.is_dir():
            report.add("ok", "exports", f"libraries of `{name}`: {folder}")
        elif settings.offline:
            way = f"copy {folder.name} from another data root to {folder.parent}"
            report.add("note", "exports", f"no libraries of `{name}`, and no network (EFT_OFFLINE): {way}")
        else:
            report.add("note", "exports", f"no libraries of `{name}` yet: the first job that needs them installs them")


def _database(report: Report, settings: Settings) -> None:
    try:
        url = make_url(settings.sqlalchemy_url)
    except ArgumentError:
        report.add(
            "problem",
            "database",
            "EFT_DATABASE_URL is not a SQLAlchemy URL, such as postgresql+psycopg://user:…@host/name",
        )
        return
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        report.add("ok", "database", f"{shown} is not there; `eft up` makes it where there is to be an installation")
        return
    database = Database(settings.sqlalchemy_url)
    try:
        checks = health.database(database)
        empty = checks["database"].ok and migrate.current(database) is None
    finally:
        database.dispose()
    if empty:
        words = (
            "there is no installation in it; EFT_DATA and EFT_DATABASE_URL name where it is. To make one here, "
            "run `eft migrate`"
        )
        report.add("problem", "schema", f"{shown}: {words}")
        return
    for what, check in checks.items():
        report.add(
            "ok" if check.ok else "problem", what, f"{shown}: {check.detail}" if what == "database" else check.detail
        )


def _broker(report: Report, settings: Settings) -> None:
    if not settings.broker_url and not settings.broker_socket.exists():
        report.add("ok", "broker", "the embedded one; it is not running, `eft up` starts it")
        return
    check = health.broker(settings.celery_broker_url)
    where = "at EFT_BROKER_URL" if settings.broker_url else "the embedded one"
    if check.ok or settings.broker_url:
        report.add("ok" if check.ok else "problem", "broker", f"{where}: {check.detail}")
    else:
        report.add("note", "broker", f"{where}: {check.detail}; `eft up` starts it")


# --- the command -----------------------------------------------------------------------------------------


def _record(path: Path, seconds: float) -> int:
    """Write what discovery reads of this machine to `path`, to be sent in."""
    sysfs = Settings.model_fields["sysfs"].default if (settings := _settings(Report())) is None else settings.sysfs
    made = record(os.environ, sysfs, "say here what it is, and whether eft finds it right", SOURCE, seconds)
    try:
        path.write_text(render(made), encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path}: written (files: {len(made.files)}, answers of programs: {len(made.tools)}).")
    print("Serial numbers are hashed; read it before you send it (docs/hardware.md).")
    return 0


SOURCE = f"recorded by `eft doctor --record` (eft {__version__}); serial numbers and names are replaced"


def main() -> int:
    parser = argparse.ArgumentParser(prog="eft doctor", description="What this box has and what is wrong with it.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a recording of this machine to send in")
    parser.add_argument(
        "--seconds", type=float, default=tools.SECONDS, help="time limit of a driver's program, seconds (%(default)g)"
    )
    given = parser.parse_args()
    if given.record is not None:
        return _record(given.record, given.seconds)
    report = examine(seconds=given.seconds)
    words = json.dumps(report.as_dict(), indent=1) if given.json else report.for_people()
    return _say(words, 0 if report.ok else 1)


def _say(words: str, status: int) -> int:
    """Print; the exit status. Whoever reads may have gone (`| head`), have another encoding, or be a full disk."""
    if sys.stdout is None:
        return status
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(words.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        if not isinstance(error, BrokenPipeError):
            print(f"the report cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    return status


if __name__ == "__main__":
    command.run("eft doctor", main)
