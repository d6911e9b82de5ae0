"""What our commands are beyond typer's: their --help is their page of the manual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])

HEADINGS = (
    "Jobs",
    "Data",
    "Queue and GPUs",
    "People, keys and notices",
    "On the box itself",
    "This command",
)
"""Of `eft --help`, in this order; a command names one as its `rich_help_panel`."""


def _path(context: Any) -> tuple[str, ...]:
    """Of a command that is being called, below `eft`."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return tuple(names)


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(self, ctx)


class Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(self, ctx)


def _show(command: Any, context: Any) -> None:
    from eft.manual import page
    from eft.manual_terminal import show

    show(page(command, _path(context)))


class App(typer.Typer):
    """A group of commands. Declare each with `@app.command()`; `eft.manual.manual` adds examples and exit codes."""

    def __init__(self, *, cls: type[TyperGroup] = Group, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, **{"cls": Command, **settings})
