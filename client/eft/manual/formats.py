"""The manual as one page for man(1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from eft.manual.delegated import sections
from eft.manual.source import ManualPage


def roff(wanted: Sequence[ManualPage]) -> str:
    """One page with a section for each command; the first of `wanted` is what it is about."""
    first, *others = wanted
    title = "-".join(("eft", *first.path)).upper()
    lines = [
        f'.TH "{title}" 1 "" "eft" "eft manual"',
        ".SH NAME",
        f"{_roff('-'.join(('eft', *first.path)))} \\- {_roff(first.summary)}",
    ]
    for page in wanted:
        below = ".SS" if page is not first else ".SH"
        if page is not first:
            lines += [f'.SH "{_roff(page.name.upper())}"', _roff(page.description)]
        lines += [f"{below} SYNOPSIS", f".B {_roff(page.usage)}"]
        if page is first:
            lines += [".SH DESCRIPTION", *_paragraphs(page.description)]
        if page.commands and not others:
            lines += [f"{below} COMMANDS", *_terms((name, words) for _, name, words in page.commands)]
        if page.arguments:
            lines += [f"{below} ARGUMENTS", *_terms((one.shown, one.help) for one in page.arguments)]
        if page.options:
            lines += [f"{below} OPTIONS", *_terms((one.shown, one.help) for one in page.options)]
        for heading, rows in sections(page.module) if page.module is not None else ():
            lines += [f"{below} {_roff(heading.upper())}", *_terms(rows)]
        if page.examples:
            lines += [f"{below} EXAMPLES"]
            for line, purpose in page.examples:
                lines += [".PP", _roff(purpose), ".PP", ".RS 4", ".nf", _roff(line), ".fi", ".RE"]
        if page.exits and (page is first):
            lines += [f"{below} EXIT STATUS", *_terms((str(code), words) for code, words in page.exits)]
        elif page.exits:
            lines += [f"{below} EXIT STATUS", _roff(", ".join(str(code) for code, _ in page.exits))]
        if page.environment and page is first:
            lines += [f"{below} ENVIRONMENT", *_terms(page.environment)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"^([.'])", r"\\&\1", plain, flags=re.MULTILINE)


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (".PP", _roff(part))]


def _terms(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [line for label, words in rows for line in (".TP", f".B {_roff(label)}", _roff(words) or "\\&")]
