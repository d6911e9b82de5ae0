"""The manual, read from the commands themselves.

A command's docstring, its options' help texts, defaults and bounds, and what `@manual` adds make up a `ManualPage`;
help on the terminal, `eft man` and docs/cli*.md are three ways to print it, and completion offers what stands in it.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eft.errors import EXIT_MEANINGS, ExitCode

F = TypeVar("F", bound=Callable[..., Any])

HEADINGS = (
    "Jobs",
    "Data",
    "Models, pipelines and sweeps",
    "Queue and GPUs",
    "People, keys and notices",
    "On the box itself",
    "This command",
)
"""Headings of `eft --help`, in this order; a command names one as its `rich_help_panel`."""

SERVER_CODES = (ExitCode.UNAVAILABLE, ExitCode.DENIED, ExitCode.NOT_FOUND, ExitCode.LOCAL, ExitCode.INTERRUPTED)
"""What may become of any command that asks a server."""

ENVIRONMENT: Mapping[str, str] = {
    "EFT_URL": "Address of the server. Overrides the login; the option --url overrides it.",
    "EFT_API_KEY": "API key. Overrides the login.",
    "XDG_CONFIG_HOME": "Folder of eft/config.toml, in which `eft login` saves address and key. Default: ~/.config.",
    "EFT_HOME": "Checkout of the service, for commands that run it. Default: the checkout of this client.",
    "NO_COLOR": "Disables colours if set and not empty.",
    "FORCE_COLOR": "Enables colours in a pipe or CI log if set and not empty. NO_COLOR overrides it.",
    "COLUMNS": "Width of tables and help, in characters. Default: the terminal's; unlimited in a pipe.",
}
_OF_SERVER = ("EFT_URL", "EFT_API_KEY", "XDG_CONFIG_HOME")
_OF_BOX = ("EFT_HOME",)
_OF_ALL = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class Added:
    """What `@manual` says of a command beside what can be seen of it."""

    examples: Sequence[tuple[str, str]] = ()
    exits: Mapping[int, str] = field(default_factory=dict)
    module: str | None = None


def manual(
    *,
    examples: Sequence[tuple[str, str]] = (),
    exits: Mapping[int, str] | Sequence[ExitCode] = (),
    module: str | None = None,
) -> Callable[[F], F]:
    """Add to a command's page. `examples`: the command line and what it is for; `exits`: codes beyond those that every
    such command has, or with other words; `module`: of the application, whose own --help has the options."""
    codes = exits if isinstance(exits, Mapping) else {int(code): EXIT_MEANINGS[code] for code in exits}

    def mark(function: F) -> F:
        function.__manual__ = Added(examples, {int(k): v for k, v in codes.items()}, module)  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or an option."""

    name: str
    flags: tuple[str, ...]
    """As they are typed; () for an argument."""
    metavar: str
    """What stands for its value; "" for a switch."""
    help: str
    """With bounds and default written out."""
    required: bool
    repeated: bool

    @property
    def shown(self) -> str:
        """`--limit, -n N`, or `JOB`."""
        if not self.flags:
            return self.metavar
        return f"{', '.join(self.flags)}{f' {self.metavar}' if self.metavar else ''}"


@dataclass(frozen=True, slots=True)
class ManualPage:
    path: tuple[str, ...]
    """Below `eft`."""
    summary: str
    description: str
    usage: str
    arguments: tuple[Parameter, ...]
    options: tuple[Parameter, ...]
    examples: tuple[tuple[str, str], ...]
    exits: tuple[tuple[int, str], ...]
    environment: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str, str], ...]
    """Commands of a group: heading, name, summary."""
    module: str | None
    """Module of the application that runs in the command's place."""

    @property
    def name(self) -> str:
        return " ".join(("eft", *self.path))

    def headings(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """A group's commands with their summaries, below the headings that they stand under."""
        if self.path:
            return [("Commands", [(name, words) for _, name, words in self.commands])] if self.commands else []
        known = {heading: [(name, words) for at, name, words in self.commands if at == heading] for heading in HEADINGS}
        return [(heading, rows) for heading, rows in known.items() if rows]


def page(command: Any, path: tuple[str, ...] = ()) -> ManualPage:
    """The page of a command or a group. Its class is typer's or click's, depending on the version; both use the same
    names."""
    callback = inspect.unwrap(command.callback) if command.callback is not None else None
    added: Added = getattr(callback, "__manual__", Added())
    summary, description = _summary(command.help or "")
    own = [parameter for parameter in command.params if not parameter.hidden]
    hints = typing.get_type_hints(callback) if callback is not None else {}
    arguments = tuple(_parameter(one, hints) for one in own if one.param_type_name == "argument")
    options = tuple(_parameter(one, hints) for one in own if one.param_type_name == "option")
    children = getattr(command, "commands", None)
    return ManualPage(
        path=path,
        summary=summary,
        description=description,
        usage=_usage(path, arguments, options, children is not None, added.module),
        arguments=arguments,
        options=options,
        examples=tuple(added.examples),
        exits=_exits(path, added, options),
        environment=tuple((name, ENVIRONMENT[name]) for name in _environment(path, added, options)),
        commands=tuple(
            (_heading(child), name, _summary(child.help or "")[0])
            for name, child in (children or {}).items()
            if not child.hidden
        ),
        module=added.module,
    )


def pages(command: Any, path: tuple[str, ...] = ()) -> Iterator[ManualPage]:
    """The pages of a command and of all below it, in the order of their declaration."""
    yield page(command, path)
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from pages(child, (*path, name))


def find(command: Any, path: Sequence[str]) -> Any | None:
    """The command that a path names."""
    for name in path:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return None
    return command


def _heading(command: Any) -> str:
    panel = command.rich_help_panel
    return panel if isinstance(panel, str) else HEADINGS[0]


def _summary(text: str) -> tuple[str, str]:
    """The first sentence, and all of it."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]
    whole = "\n\n".join(part for part in paragraphs if part)
    first = re.match(r"(.+?[.!?])(?=\s|$)", whole, re.DOTALL)
    return (first[1] if first else whole), whole


def _parameter(one: Any, hints: Mapping[str, Any]) -> Parameter:
    is_argument = one.param_type_name == "argument"
    kind = _plain(hints.get(one.name, str))
    switch = bool(getattr(one, "is_flag", False))
    metavar = "" if switch else (one.metavar or _METAVARS.get(kind, "TEXT"))
    if is_argument:
        metavar = re.sub(r"^\[(.*)\](\.\.\.)?$", r"\1\2", one.metavar or one.name.upper())  # as typer writes: [FILE]...
        metavar = metavar if one.required else f"[{metavar}]"
    words = (one.help or "").strip()
    words += "" if not words or words.endswith((".", "!", "?", ")", "…")) else "."
    bounds = _bounds(one) if not switch else ""
    if bounds:
        words = f"{words} {bounds[0].upper()}{bounds[1:]}."
    default = one.default
    shown = not switch and not one.required and isinstance(default, int | float | str) and default != ""
    if shown and "Default" not in words:
        words = f"{words} Default: {default:g}." if isinstance(default, float) else f"{words} Default: {default}."
    return Parameter(
        name=one.name,
        flags=() if is_argument else (*one.opts, *one.secondary_opts),
        metavar=metavar,
        help=words.strip(),
        required=one.required,
        repeated=bool(getattr(one, "multiple", False)) or one.nargs != 1,
    )


def _plain(kind: Any) -> Any:
    """int of `int | None`, of `list[int]`, and so on."""
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    return _plain(inner[0]) if inner else kind


def _bounds(one: Any) -> str:
    kind = getattr(one, "type", None)
    low = getattr(one, "min", None) if kind is None else getattr(kind, "min", None)
    high = getattr(one, "max", None) if kind is None else getattr(kind, "max", None)
    match low, high:
        case None, None:
            return ""
        case _, None:
            return f"at least {low:g}"
        case None, _:
            return f"at most {high:g}"
        case _:
            return f"{low:g} to {high:g}"


def _usage(
    path: tuple[str, ...],
    arguments: tuple[Parameter, ...],
    options: tuple[Parameter, ...],
    group: bool,
    module: str | None,
) -> str:
    words = ["eft", *path]
    if module is not None:
        return " ".join([*words, "[OPTION]…"])
    if group:
        return " ".join([*words, "COMMAND", "[OPTION]…"])
    needed = [f"{one.flags[0]} {one.metavar}" for one in options if one.required]
    others = any(not one.required for one in options)
    return " ".join([*words, *(one.metavar for one in arguments), *needed, *(["[OPTION]…"] if others else [])])


def _asks_a_server(options: Sequence[Parameter]) -> bool:
    return any("--url" in one.flags for one in options)


def _exits(path: tuple[str, ...], added: Added, options: Sequence[Parameter]) -> tuple[tuple[int, str], ...]:
    if not path:  # of `eft` itself: the whole table
        return tuple((int(code), meaning) for code, meaning in EXIT_MEANINGS.items())
    if added.module is not None:
        return ()  # its own
    codes = {int(code): EXIT_MEANINGS[code] for code in (ExitCode.OK, ExitCode.USAGE)}
    if ExitCode.FAILED not in added.exits:
        codes[int(ExitCode.OK)] = "done"
    if _asks_a_server(options):
        codes |= {int(code): EXIT_MEANINGS[code] for code in SERVER_CODES}
    return tuple(sorted((codes | dict(added.exits)).items()))


def _environment(path: tuple[str, ...], added: Added, options: Sequence[Parameter]) -> tuple[str, ...]:
    if not path:
        return tuple(ENVIRONMENT)
    if added.module is not None:
        return _OF_BOX
    return (*(_OF_SERVER if _asks_a_server(options) else ()), *_OF_ALL)
