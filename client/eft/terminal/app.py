"""Commands and groups whose --help is their page of the manual."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from eft.manual.source import page

F = TypeVar("F", bound=Callable[..., Any])


def _path(context: Any) -> tuple[str, ...]:
    """Names of the command that is being called, below `eft`."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return tuple(names)


UsageError: Any = typer.BadParameter.__mro__[1]
"""The framework's: wrong words on the command line."""


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _hinting(ctx):
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(self, ctx)


class Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _hinting(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from eft.terminal.astray import meant

        if args[0] not in self.commands:
            args = [meant(args[0], self.commands), *args[1:]]
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            from eft.terminal.astray import command

            hint = command(args[0], _path(ctx), self.commands)
            if hint and getattr(error, "option_name", None) is None:
                error.message = f"{error.message.partition('. Did you mean')[0].rstrip('.')}.{hint}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(self, ctx)


class Root(Group):
    """`eft` itself, around every command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["eft.json"] = "--json" in args
        return super().parse_args(ctx, _common_options_last(args))

    def invoke(self, ctx: Any) -> Any:
        from eft.runner import told

        with told(ctx.meta["eft.json"]):
            return super().invoke(ctx)


def _common_options_last(args: list[str]) -> list[str]:
    """`eft --url U ls` as `eft ls --url U`: the options that every command has may stand before it."""
    moved: list[str] = []
    rest = list(args)
    while rest and (rest[0] == "--json" or rest[0].partition("=")[0] == "--url"):
        count = 2 if rest[0] == "--url" and len(rest) > 1 else 1
        moved += rest[:count]
        del rest[:count]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *moved, *rest[end:]]


@contextmanager
def _hinting(context: Any) -> Generator[None, None, None]:
    """An option that is not there is told with what may have been meant, where no spelling is near."""
    try:
        yield
    except UsageError as error:
        name = getattr(error, "option_name", None)
        if name is not None and error.message.startswith("No such option"):
            from eft.terminal.astray import option, options

            hint = option(name, _path(context), options(context.find_root().command))
            if hint:
                error.possibilities = None
                error.message = f"{error.message.rstrip('.')}.{hint}"
        raise


def _show(command: Any, context: Any) -> None:
    from eft.manual.terminal import show  # rich is imported where it prints

    show(page(command, _path(context)))


class App(typer.Typer):
    """A group of commands. Declare each with `@app.command()`; `eft.manual.source.manual` adds examples and exit
    codes."""

    def __init__(self, *, cls: type[TyperGroup] = Group, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, **{"cls": Command, **settings})
