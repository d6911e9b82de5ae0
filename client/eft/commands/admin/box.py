"""`eft up|train|migrate`, `eft worker run` and `eft keys local`: start the application itself, where it is there.

The client imports nothing of it. It starts `python -m …` in the user's own folder (paths on the command line and
EFT_DATA mean what they say there) with the checkout first on the path and the current folder not on it: a folder
called `core` beside the user's data must not stand in for ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from eft.errors import ConfigError
from eft.manual.source import manual
from eft.session import outputs

VERBS = {
    "up": ("box.up", "Run the whole service on this machine: SQLite, embedded broker, API, one worker."),
    "train": ("core.train.entry.cli", "Train on this machine, without a server."),
    "verify": ("core.train.entry.verify", "Replay a job's first steps under TRL and compare the curves."),
    "doctor": ("box.doctor", "Show the box's hardware and software, problems and remedies."),
    "migrate": ("core.db.migrate", "Upgrade the database to the newest schema."),
    "db": ("box.db", "Show the database's schema, or upgrade it while jobs run."),
    "backup": ("box.backup", "Back up database and data root while jobs run."),
    "restore": ("box.restore", "Restore a backup into an empty installation."),
    "adopt": ("box.adopt", "Declare EFT_DATA to be the data root of this database."),
    "service": ("box.systemd.service", "eft under systemd on this machine: install, uninstall, status."),
}
"""Verb → module of the application, and what it does."""
MARK = Path("core") / "spec" / "job.py"


def application_home() -> Path:
    """The checkout: EFT_HOME, or the one this client is installed from. Raises ConfigError when there is none."""
    given = os.environ.get("EFT_HOME")
    home = Path(given).expanduser().resolve() if given else Path(__file__).resolve().parents[4]
    if not (home / MARK).is_file():
        raise ConfigError(
            f"EFT_HOME={given} is not a checkout of eft"
            if given
            else "this verb runs the service itself and only the client is installed here: set EFT_HOME to a checkout. "
            "`eft files upload` checks data where the server is"
        )
    return home


def command(home: Path, module: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """What to execute, and its environment."""
    # Another checkout has its own packages; our own runs under the interpreter we run under.
    own = home / ".venv" / "bin" / "python"
    python = str(own) if os.environ.get("EFT_HOME") and own.is_file() else sys.executable
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(home), *others]), "PYTHONSAFEPATH": "1"}
    return [python, "-m", module, *arguments], environment


WORKER = ("worker", "Run this box's worker with a remote database and broker.")
KEYS = ("api.auth.keys", "Create, list and revoke keys on the server itself, without a key.")


def register(app: typer.Typer, heading: str) -> None:
    for verb, (module, words) in VERBS.items():
        pass_on(app, verb, module, words, rich_help_panel=heading)


def pass_on(app: typer.Typer, verb: str, module: str, words: str, **settings: Any) -> None:
    """Declare a command that a module of the application does: all behind it is the module's."""

    @manual(module=module)
    def start(context: typer.Context) -> None:
        become(module, context)

    app.command(
        verb,
        help=words,
        add_help_option=False,  # its own --help is asked
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        **settings,
    )(start)


def become(module: str, context: typer.Context) -> NoReturn:
    """Execute a module of the application with the rest of the command line."""
    with outputs(False):
        arguments, environment = command(application_home(), module, context.args)
        sys.stdout.flush()
        # In our place, not below us: signals and the exit code are the application's own.
        os.execve(arguments[0], arguments, environment)  # noqa: S606 -- no shell is wanted
