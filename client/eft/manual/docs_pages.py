"""The manual as pages of docs/: cli.md has jobs and data, cli-models.md models, pipelines and sweeps,
cli-operators.md the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from eft.errors import EXIT_MEANINGS, ExitCode
from eft.manual.delegated import Section, sections
from eft.manual.source import HEADINGS, SERVER_CODES, ManualPage, Parameter
from eft.session import HANDLE

JOBS, DATA, MODELS, QUEUE, PEOPLE, BOX, ITSELF = HEADINGS
SHARED_BY = 5
"""Commands that have an option in the same words, from which on the page describes it once."""
NAMED_BY = 3
"""The same for arguments."""
USUAL_CODES = {0, 2, *(int(code) for code in SERVER_CODES)}

Row = tuple[str, str]


def user_page(everything: Sequence[ManualPage]) -> str:
    """docs/cli.md."""
    root = everything[0]
    shared = _shared(everything)
    everywhere, others = _everywhere(everything, shared)
    lines = [
        "# The command line",
        "",
        "Generated from the commands by `make docs`. `eft help COMMAND` prints the same in a terminal, and `eft man`",
        "shows it as a manual page. `eft completion bash` (or zsh, fish) enables completion of commands, options and",
        "the ids of jobs, files, nodes and more. [cli-models.md](cli-models.md) has the commands for models, pipelines",
        "and sweeps, [cli-operators.md](cli-operators.md) those for queue, GPUs, people, keys, and the box itself.",
        "",
        root.description,
        "",
        "## Options and arguments of many commands",
        "",
        *_list(everywhere),
        *_without(everything, everywhere),
        "",
        "Some commands have these too; their section names them:",
        "",
        *_list(others),
        "",
        "Arguments:",
        "",
        *_list(_by_words((shown, words) for shown, words in sorted(shared) if not shown.startswith("-"))),
        "",
        "## Exit codes",
        "",
        "| code | |",
        "|---|---|",
        *(f"| {code} | {_cell(words)} |" for code, words in root.exits),
        "",
        f"Commands that ask the server use {_codes(USUAL_CODES)}, with 0 for done. A section names further ones.",
        "",
        "## Environment",
        "",
        *_list(root.environment),
    ]
    return "\n".join([*lines, *_sections(everything, [JOBS, DATA, ITSELF])]) + "\n"


def model_page(everything: Sequence[ManualPage]) -> str:
    """docs/cli-models.md."""
    return _further("The command line for models, pipelines and sweeps", everything, [MODELS])


def operator_page(everything: Sequence[ManualPage]) -> str:
    """docs/cli-operators.md."""
    return _further("The command line for operators", everything, [QUEUE, PEOPLE, BOX])


def _further(title: str, everything: Sequence[ManualPage], headings: Sequence[str]) -> str:
    lines = [
        f"# {title}",
        "",
        "Generated from the commands by `make docs`. [cli.md](cli.md) has the commands for jobs, and the",
        "[options](cli.md#options-and-arguments-of-many-commands), [exit codes](cli.md#exit-codes) and",
        "[variables](cli.md#environment) that all commands share.",
    ]
    return "\n".join([*lines, *_sections(everything, headings)]) + "\n"


PAGES = {"cli.md": user_page, "cli-models.md": model_page, "cli-operators.md": operator_page}


def _sections(everything: Sequence[ManualPage], headings: Sequence[str]) -> list[str]:
    root, *others = everything
    shared = _shared(everything)
    lines: list[str] = []
    commands = dict(root.headings())
    here = {name for heading in headings for name, _ in commands.get(heading, ())}
    asked = [page for page in others if page.path[0] in here]
    with ThreadPoolExecutor(4) as pool:  # each asks a program for its --help, which takes a CPU second
        told = dict(pool.map(lambda page: (page.path, sections(page.module) if page.module else ()), asked))
    for heading in headings:
        lines += ["", f"## {heading}"]
        for name, _ in commands.get(heading, ()):
            for page in asked:
                if page.path[0] == name and (page.module is not None or not page.commands):
                    lines += _section(page, told[page.path], shared)
    return lines


def _section(page: ManualPage, told: Sequence[Section], shared: set[Row]) -> list[str]:
    lines = ["", f"### {page.name}", "", f"`{page.usage}`", "", page.description]
    own = [one for one in (*page.arguments, *page.options) if one.name != "help"]
    rows = [_row(one) for one in own if _row(one) not in shared]
    examples = [(line, purpose) for line, purpose in page.examples]
    for heading, more in told:
        if heading.lower().startswith("example"):
            examples += more
        else:
            rows += [row for row in more if not row[0].startswith("-h")]
    if rows:
        lines += ["", *_list(rows)]
    named = [one.shown for one in page.options if _row(one) in shared and not {"--url", "--json"} & {*one.flags}]
    if named:
        lines += ["", f"Also: {', '.join(f'`{name}`' for name in named)}."]
    if examples:
        lines += ["", "<!-- shown: examples -->", "```bash"]
        for line, purpose in examples:
            lines += [*([f"# {purpose}"] if purpose else []), line]
        lines += ["```"]
    common = dict(EXIT_MEANINGS.items())  # their words stand in the table; here codes beyond the usual ones
    special = [
        str(code) if common.get(ExitCode(code)) == words else f"{code} ({words})"
        for code, words in page.exits
        if code and (code not in USUAL_CODES or common.get(ExitCode(code)) != words)
    ]
    if special:
        lines += ["", f"Exit codes beside the usual: {', '.join(special)}."]
    return lines


def _by_words(rows: Iterable[Row]) -> list[Row]:
    """Those that take the same handle in one row."""
    found: dict[str, list[str]] = {}
    for label, words in rows:
        same = HANDLE if words.endswith(f": {HANDLE}.") else words
        found.setdefault(same, []).append(label)
    return [
        ("`, `".join(labels), f"{words[:1].upper()}{words[1:]}." if words == HANDLE else words)
        for words, labels in found.items()
    ]


def _row(one: Parameter) -> Row:
    return one.shown, one.help


def _shared(everything: Sequence[ManualPage]) -> set[Row]:
    """Options and arguments that several commands have in the same words."""
    options = Counter(_row(one) for page in everything for one in page.options if one.name != "help")
    arguments = Counter(_row(one) for page in everything for one in page.arguments)
    return {row for row, times in options.items() if times >= SHARED_BY} | {
        row for row, times in arguments.items() if times >= NAMED_BY
    }


def _everywhere(everything: Sequence[ManualPage], shared: set[Row]) -> tuple[list[Row], list[Row]]:
    """Shared options that commands have as a rule, and the others; in the order of the commands."""
    options = dict.fromkeys(_row(one) for page in everything for one in page.options if _row(one) in shared)
    usual = [row for row in options if row[0].startswith(("--url", "--json"))]
    return usual, [row for row in options if row not in usual]


def _without(everything: Sequence[ManualPage], usual: Sequence[Row]) -> list[str]:
    """Sentences about commands that lack an option which commands have as a rule."""
    lines = []
    for row in usual:
        lacking = [
            page.name
            for page in everything[1:]
            if not page.commands and page.module is None and row not in [_row(one) for one in page.options]
        ]
        if lacking:
            names = ", ".join(f"`{name}`" for name in lacking)
            lines += ["", f"Without `{row[0].split()[0]}`: {names}, and the commands of the box itself."]
    return lines


def _codes(codes: Iterable[int]) -> str:
    *most, last = sorted(codes)
    return f"{', '.join(map(str, most))} and {last}"


def _list(rows: Iterable[Row]) -> list[str]:
    return [f"- `{_cell(label)}`: {_cell(words)}" if words else f"- `{_cell(label)}`" for label, words in rows]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
