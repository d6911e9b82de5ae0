"""What a program of the application says of its own options: its --help, read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from eft.commands.admin.box import application_home, command
from eft.errors import ConfigError

Section = tuple[str, list[tuple[str, str]]]
"""A heading, and labels with their words."""

_HEADING = re.compile(r"^(\S.*):$")
_ROW = re.compile(r"^ {2,6}(\S.*?)(?: {2,}(\S.*))?$")
_CONTINUED = re.compile(r"^ {8,}(\S.*)$")


def sections(module: str) -> Sequence[Section]:
    """Arguments, options and what else its --help lists; one word of explanation where the application is not here."""
    try:
        call, environment = command(application_home(), module, ["--help"])
    except ConfigError as error:
        return [("Options", [("", error.message)])]
    environment |= {"COLUMNS": "10000", "NO_COLOR": "1"}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return [("Options", [("", f"python -m {module} --help: {last}")])]
    return parse(done.stdout)


def parse(text: str) -> list[Section]:
    """argparse's help, in whatever version."""
    found: list[Section] = []
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            if not line.startswith("usage"):
                found.append((_capital(heading[1]), []))
        elif not found:
            continue  # usage and description
        elif not line.strip():
            continue
        elif more := _CONTINUED.match(line):
            rows = found[-1][1]
            if rows:
                label, words = rows[-1]
                rows[-1] = label, f"{words} {more[1]}".strip()
        elif row := _ROW.match(line):
            found[-1][1].append((row[1], row[2] or ""))
    return [(heading, rows) for heading, rows in found if rows]


def _capital(words: str) -> str:
    named = {"positional arguments": "Arguments", "options": "Options"}
    return named.get(words, words[:1].upper() + words[1:])
