"""What stands on the project's pages: fenced blocks with their marks, headings, links, and the commands among them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.service import ROOT

RUN = ("bash", "python")
SHOWN = ("text", "yaml", "json")
NEEDS = {
    "a GPU",
    "an AMD GPU",
    "an NVIDIA GPU",
    "root",
    "docker",
    "the network",
    "an object store",
    "a second box",
    "an installation of its own",
}
"""What a block may need that a test has not: everything else has to run."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Line of the opening fence."""
    language: str
    text: str
    mark: tuple[str, str] | None
    """From the comment on the line above: (needs | run by | shown, what)."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.mark is None


def pages() -> list[Path]:
    """Every page that people read, the README first."""
    folders = sorted(path for top in ("docs", "examples", "deploy") for path in (ROOT / top).rglob("*.md"))
    return [ROOT / "README.md", *folders, ROOT / "client" / "README.md"]


def blocks(page: Path) -> list[Block]:
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        if fence := re.fullmatch(r"( *)```(\S*)", lines[number]):
            indent, start = fence[1], number
            number += 1
            while lines[number] != f"{indent}```":
                number += 1
            text = "\n".join(line.removeprefix(indent) for line in lines[start + 1 : number]) + "\n"
            mark = re.fullmatch(r" *<!-- (needs|run by|shown): (.+) -->", lines[start - 1]) if start else None
            found.append(Block(page, start + 1, fence[2], text, (mark[1], mark[2]) if mark else None))
        number += 1
    return found


def prose(page: Path) -> str:
    """The page without its blocks, lines kept."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            lines.append("")
        else:
            lines.append("" if inside else line)
    return "\n".join(lines)


def indented(page: Path) -> list[int]:
    """Lines that are a block by their indentation alone, where nothing says what they are."""
    lines, found = prose(page).splitlines(), []
    for number, line in enumerate(lines):
        if line.startswith("    ") and line.strip() and (number == 0 or not lines[number - 1].strip()):
            before = next((one for one in reversed(lines[:number]) if one.strip()), "")
            if not re.match(r" *([-*]|\d+\.) ", before) and not before.startswith("  "):
                found.append(number + 1)
    return found


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        again = found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}-{again}" if again else slug)
    return names


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of those that lead to a file or heading of the project."""
    for number, line in enumerate(prose(page).splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if "://" not in target and not target.startswith("mailto:"):
                yield number, target


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(place, words behind `eft`) of every `eft` command line in its blocks and in its prose."""
    for block in blocks(page):
        if block.language == "bash":
            for number, line in enumerate(_joined(block.text), block.line + 1):
                for words in _calls(line):
                    yield f"{page.relative_to(ROOT)}:{number}", words
    for number, line in enumerate(prose(page).splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line):
            for words in _calls(span) if span.startswith("eft ") else ():
                yield f"{page.relative_to(ROOT)}:{number}", words


def _joined(text: str) -> list[str]:
    return re.sub(r"\\\n", lambda _: " \x00", text).replace("\x00", "").splitlines()


def _calls(line: str) -> Iterator[list[str]]:
    for found in re.finditer(r"(?:^|[\s(;|&\"]|bin/)eft ((?:[a-z]|-)[^|;&)]*)", re.sub(r"(^|\s)#.*", "", line)):
        try:
            words = shlex.split(found[1])
        except ValueError:  # a quote that the pattern has cut through
            words = found[1].split()
        yield words
