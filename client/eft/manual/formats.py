"""The manual as one page for man(1), and as docs/cli.md, which `python -m eft.manual` prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from eft.errors import EXIT_MEANINGS, ExitCode
from eft.manual.delegated import Section, sections
from eft.manual.source import ManualPage

# --- man


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


# --- docs/cli.md


def markdown(everything: Sequence[ManualPage]) -> str:
    """The whole manual."""
    root, *others = everything
    with ThreadPoolExecutor(4) as pool:  # each asks a program for its --help
        told = dict(pool.map(lambda page: (page.path, sections(page.module) if page.module else ()), others))
    lines = [
        "# The command line",
        "",
        "Generated from the commands by `make docs`. `eft help COMMAND` prints the same in a terminal, and `eft man`",
        "shows it as a manual page. `eft completion bash` (or zsh, fish) enables completion of commands, options and",
        "the ids of jobs, files, nodes and more.",
        "",
        root.description,
        "",
        "## Exit codes",
        "",
        "| code | |",
        "|---|---|",
        *(f"| {code} | {_cell(words)} |" for code, words in root.exits),
        "",
        "## Environment",
        "",
        "| variable | |",
        "|---|---|",
        *(f"| `{name}` | {_cell(words)} |" for name, words in root.environment),
    ]
    for heading, rows in root.headings():
        lines += ["", f"## {heading}"]
        for name, _ in rows:
            for page in others:
                if page.path[0] == name:
                    lines += _section(page, told[page.path])
    return "\n".join(lines) + "\n"


def _section(page: ManualPage, told: Sequence[Section]) -> list[str]:
    lines = ["", f"### {page.name}", "", page.description]
    if page.commands:
        lines += ["", *(f"- `{page.name} {name}`: {words}" for _, name, words in page.commands)]
        return lines
    lines += ["", "```text", page.usage, "```"]
    rows = [(one.shown, one.help) for one in (*page.arguments, *page.options) if one.name != "help"]
    examples = [(line, purpose) for line, purpose in page.examples]
    for heading, more in told:
        if heading.lower().startswith("example"):
            examples += more
        else:
            rows += [row for row in more if not row[0].startswith("-h")]
    if rows:
        lines += ["", "| | |", "|---|---|", *(f"| `{_cell(label)}` | {_cell(words)} |" for label, words in rows)]
    if examples:
        lines += ["", "<!-- shown: examples -->", "```bash"]
        for line, purpose in examples:
            lines += [*([f"# {purpose}"] if purpose else []), line]
        lines += ["```"]
    if page.exits:  # their words stand in the table above; here those that differ
        common = dict(EXIT_MEANINGS.items())
        special = [f"; {code}: {words}" for code, words in page.exits if code and common.get(ExitCode(code)) != words]
        lines += ["", f"Exit codes: {', '.join(str(code) for code, _ in page.exits)}{''.join(special)}."]
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
