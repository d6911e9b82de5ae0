"""What commands about pipelines and sweeps have in common: both are several jobs with one status."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer
from rich.markup import escape

from eft.commands.waiting import going_on
from eft.terminal.output import Output, status_markup
from eft.types import Pipeline, Sweep

S = TypeVar("S", Pipeline, Sweep)


def print_id(output: Output, made: Pipeline | Sweep) -> None:
    """What `eft submit` prints where it does not wait."""
    output.json(made.raw) if output.as_json else output.text(f"{made.id}\n")


def print_head(output: Output, found: Pipeline | Sweep) -> None:
    """Id, name, status and reason in one line."""
    named = f" ({escape(found.name)})" if found.name else ""
    words = f": {escape(found.reason)}" if found.reason else ""
    output.data.print(f"{found.id}{named} {status_markup(found.status)}{words}", soft_wrap=True)


def print_status(output: Output, found: Pipeline | Sweep) -> None:
    """What a cancel prints."""
    output.json(found.raw) if output.as_json else output.text(f"{found.id} {found.status}\n")


def show_end(output: Output, wait: Callable[[], S], show: Callable[[Output, S], None]) -> None:
    """Wait for the end, show it, and exit as it did."""
    with going_on(output, None):
        found = wait()
    show(output, found)
    raise typer.Exit(found.exit_code)
