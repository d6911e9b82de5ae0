"""A terminal's picture: what stands where, and in which style, after the bytes that a program has written.

It knows the sequences that `eft` writes and raises on any other, so that no picture is wrong in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b([=>])")
IGNORED_MODES = {"?25", "?1", "?7", "?2004"}
OTHER_PAGE = "?1049"


@dataclass(frozen=True, slots=True)
class Style:
    color: str | None = None
    bold: bool = False
    dim: bool = False


Cell = tuple[str, Style]
BLANK: Cell = (" ", Style())
COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Emulator:
    """`columns` × `lines`. `feed` takes text as the program writes it; `picture` is what stands there now."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self._page = self._empty()
        self._kept: tuple[list[list[Cell]], int, int] | None = None
        self._x = self._y = 0
        self._style = Style()
        self._rest = ""

    def picture(self) -> tuple[tuple[Cell, ...], ...]:
        return tuple(tuple(row) for row in self._page)

    def feed(self, text: str) -> None:
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            char = text[at]
            if char == "\x1b":
                found = SEQUENCE.match(text, at)
                if found is None:
                    if len(text) - at < 20:  # the rest of it comes with the next bytes
                        self._rest = text[at:]
                        return
                    raise ValueError(f"unknown sequence {text[at : at + 20]!r}")
                if found[2]:
                    self._control(found[1], found[2])
                at = found.end()
                continue
            at += 1
            match char:
                case "\r":
                    self._x = 0
                case "\n":
                    self._down()
                case "\b":
                    self._x = max(0, self._x - 1)
                case "\x07":
                    pass
                case _:
                    if self._x >= self.columns:
                        self._x = 0
                        self._down()
                    self._page[self._y][self._x] = (char, self._style)
                    self._x += 1

    def _empty(self) -> list[list[Cell]]:
        return [[BLANK] * self.columns for _ in range(self.lines)]

    def _down(self) -> None:
        if self._y < self.lines - 1:
            self._y += 1
        else:
            self._page = [*self._page[1:], [BLANK] * self.columns]

    def _control(self, given: str, letter: str) -> None:
        numbers = [int(one) for one in given.split(";") if one.isdigit()]
        first = numbers[0] if numbers else 0
        match letter:
            case "m":
                self._paint(numbers or [0])
            case "H":
                self._y = min(self.lines, max(1, first)) - 1
                self._x = min(self.columns, max(1, numbers[1] if len(numbers) > 1 else 1)) - 1
            case "A":
                self._y = max(0, self._y - max(1, first))
            case "B":
                self._y = min(self.lines - 1, self._y + max(1, first))
            case "G":
                self._x = max(1, first) - 1
            case "K":
                start, end = {0: (self._x, self.columns), 1: (0, self._x + 1), 2: (0, self.columns)}[first]
                self._page[self._y][start:end] = [BLANK] * (end - start)
            case "J" if first in (0, 2):
                if first == 2:
                    self._page = self._empty()
                else:
                    self._page[self._y][self._x :] = [BLANK] * (self.columns - self._x)
                    for row in range(self._y + 1, self.lines):
                        self._page[row] = [BLANK] * self.columns
            case "h" if given == OTHER_PAGE:
                self._kept = (self._page, self._x, self._y)
                self._page, self._x, self._y = self._empty(), 0, 0
            case "l" if given == OTHER_PAGE and self._kept is not None:
                (self._page, self._x, self._y), self._kept = self._kept, None
            case "h" | "l" if given in IGNORED_MODES:
                pass
            case _:
                raise ValueError(f"unknown sequence ESC[{given}{letter}")

    def _paint(self, numbers: list[int]) -> None:
        at = 0
        while at < len(numbers):
            number = numbers[at]
            if number == 0:
                self._style = Style()
            elif number == 1:
                self._style = replace(self._style, bold=True)
            elif number == 2:
                self._style = replace(self._style, dim=True)
            elif number == 22:
                self._style = replace(self._style, bold=False, dim=False)
            elif 30 <= number <= 37:
                self._style = replace(self._style, color=COLORS[number - 30])
            elif number == 39:
                self._style = replace(self._style, color=None)
            elif 90 <= number <= 97:
                self._style = replace(self._style, color=COLORS[number - 90])
            elif number == 38 and numbers[at + 1] == 5:
                self._style = replace(self._style, color=_named(numbers[at + 2]))
                at += 2
            elif number == 38 and numbers[at + 1] == 2:
                self._style = replace(self._style, color="#{:02x}{:02x}{:02x}".format(*numbers[at + 2 : at + 5]))
                at += 4
            at += 1  # others (italic, underlined, background) are not drawn


def _named(number: int) -> str:
    if number < 16:
        return COLORS[number % 8]
    if number >= 232:
        return "#{0:02x}{0:02x}{0:02x}".format(8 + 10 * (number - 232))
    steps = [0, 95, 135, 175, 215, 255]
    number -= 16
    return f"#{steps[number // 36]:02x}{steps[number // 6 % 6]:02x}{steps[number % 6]:02x}"
