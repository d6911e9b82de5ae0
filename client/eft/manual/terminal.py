"""A page of the manual on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eft.manual.source import ManualPage
from eft.terminal.output import stdout_console

READABLE = 100
"""Lines of prose longer than this are hard to read, however wide the terminal is."""
LABEL = 26
"""Where a label is longer than this, its text begins on the next line."""


def show(page: ManualPage) -> None:
    """Print it on stdout."""
    console = stdout_console()
    if not sys.stdout.isatty() or console.width > READABLE:
        console.width = min(console.width, READABLE)
    render(page, console)


def render(page: ManualPage, console: Console) -> None:
    _prose(console, page.description)
    _heading(console, "Usage")
    console.print(Padding(Text(page.usage), (0, 0, 0, 2), expand=False))
    for heading, rows in page.headings():
        _heading(console, heading)
        _pairs(console, rows)
    if page.arguments:
        _heading(console, "Arguments")
        _pairs(console, [(one.shown, one.help) for one in page.arguments])
    if page.options:
        _heading(console, "Options")
        _pairs(console, [(one.shown, one.help) for one in page.options])
    if page.module is not None:
        from eft.manual.delegated import sections

        for heading, rows in sections(page.module):
            _heading(console, heading)
            _pairs(console, rows)
    if page.examples:
        _heading(console, "Examples")
        for line, purpose in page.examples:
            console.print(Padding(Text(f"# {purpose}", style="dim"), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(line, style="bold"), (0, 0, 0, 2), expand=False), soft_wrap=True)
    if page.exits:
        _heading(console, "Exit codes")
        _pairs(console, [(f"{code:>3}", meaning) for code, meaning in page.exits])
    if page.environment:
        _heading(console, "Environment")
        _pairs(console, page.environment)
    if page.commands:
        console.print()
        _prose(console, f"`eft help {' '.join((*page.path, 'COMMAND'))}` has the options, examples and exit codes.")


def _heading(console: Console, words: str) -> None:
    console.print()
    console.print(Text(words, style="bold yellow"))


def _prose(console: Console, words: str) -> None:
    for number, paragraph in enumerate(words.split("\n\n")):
        if number:
            console.print()
        console.print(Text(paragraph))


def _pairs(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max((len(label) for label, _ in rows if len(label) <= LABEL), default=LABEL)
    for label, words in rows:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=width, no_wrap=True)
        table.add_column()
        if len(label) > LABEL or console.width < width + 30:
            console.print(Padding(Text(label, style="cyan"), (0, 0, 0, 2), expand=False), soft_wrap=True)
            console.print(Padding(Text(words), (0, 0, 0, 6), expand=False))
        else:
            table.add_row(Text(label, style="cyan"), Text(words))
            console.print(Padding(table, (0, 0, 0, 2), expand=False))
