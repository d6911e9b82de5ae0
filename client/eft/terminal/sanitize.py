"""Strangers' text on a terminal: log lines, names, a proxy's error page. A terminal obeys control characters in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition, ECMA-48 8.3.117: left out without a mark, since libraries colour their logs."""
JOINERS = "\u200c\u200d"
"""Not printable for Python, harmless, and parts of emoji and of several scripts."""


def harmless(text: str, keep: str = "\n\t") -> str:
    """`text` with a mark in place of whatever a terminal might obey, or that turns its reading direction round."""
    if text.isprintable():
        return text
    allowed = keep + JOINERS
    return "".join(
        char if char.isprintable() or char in allowed else "\N{REPLACEMENT CHARACTER}" for char in COLOUR.sub("", text)
    )


def lines(text: str) -> str:
    """What a program has printed, for a terminal: a bar that it draws over itself becomes lines."""
    return harmless(text.replace("\r\n", "\n").replace("\r", "\n"))


def segment(one: Segment) -> Segment:
    """Sanitize a segment of rich, whose own control codes stay."""
    if one.control or one.text.isprintable():
        return one
    return Segment(harmless(one.text, "\n"), one.style)


class HarmlessConsole(Console):
    """Prints no control character that comes from a text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return map(segment, super().render(renderable, options))


def document(value: Any, *, ascii_only: bool) -> str:
    """JSON on one line: what no terminal should see, and half a surrogate pair, is escaped in it, which JSON allows."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
