"""What the command prints: people's tables, machines' JSON on stdout, everything else on stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eft.errors import ApiError, EftClientError, Fault
from eft.terminal.sanitize import HarmlessConsole, document, lines
from eft.times import shown
from eft.types import File, Job

STATUS_STYLE = {
    "queued": "cyan",
    "preparing": "cyan",
    "starting": "blue",
    "running": "blue",
    "pausing": "yellow",
    "paused": "magenta",
    "stopping": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "parking": "yellow",
    "parked": "magenta",
    "closing": "yellow",
    "closed": "yellow",
}


def stdout_console() -> Console:
    """A pipe has no width: a table that is cut to 80 columns would lose what grep looks for. COLUMNS gives it one."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 10_000
    return HarmlessConsole(highlight=False, width=width)


@dataclass
class Output:
    """`data` is stdout, `notes` is stderr; rich leaves colours out for pipes and NO_COLOR."""

    as_json: bool
    data: Console
    notes: Console

    @classmethod
    def make(cls, as_json: bool) -> Output:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A log in every script of the world, on a terminal of one: characters it lacks are spelled, as on stderr.
            sys.stdout.reconfigure(errors="backslashreplace")
        return cls(as_json, stdout_console(), HarmlessConsole(stderr=True, highlight=False))

    @property
    def live(self) -> bool:
        """Bars may move on stderr. Not asked of rich: FORCE_COLOR, which CI systems set, makes no terminal of a log."""
        return sys.stderr.isatty() and not self.notes.is_dumb_terminal

    @property
    def live_stdout(self) -> bool:
        return sys.stdout.isatty() and not self.data.is_dumb_terminal

    def json(self, told: Any) -> None:
        """One document (or one line of JSON lines) on stdout, past any wrapping."""
        sys.stdout.write(document(told, ascii_only=_narrow(sys.stdout)) + "\n")
        sys.stdout.flush()

    def table(self, table: Table, rows: str) -> None:
        """Print a table of `rows` ("jobs"). Where there are none, a person reads so, and not a lone line of headers."""
        if table.row_count or not self.data.is_terminal:
            self.data.print(table)
        else:
            self.note(f"no {rows}")

    def note(self, text: str) -> None:
        """For people, on stderr; markup is not read in it."""
        self.notes.print(text, markup=False, soft_wrap=True)

    def text(self, text: str) -> None:
        """Text on stdout: as it is in a pipe or a file, without what a terminal would obey on one."""
        sys.stdout.write(lines(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def _narrow(stream: Any) -> bool:
    """Whether its encoding has not every character."""
    return not (stream.encoding or "").lower().replace("-", "").startswith("utf")


def print_error(error: EftClientError, output: Output) -> None:
    """Code, message, field, every fault, request id; one JSON document with --json. All on stderr."""
    if output.as_json:
        sys.stderr.write(document({"error": error.as_dict()}, ascii_only=_narrow(sys.stderr)) + "\n")
        return
    console = output.notes
    faults = error.faults if isinstance(error, ApiError) else ()
    several = len(faults) > 1
    message = f"{len(faults)} faults" if several and _repeats(error, faults[0]) else error.message
    code = f" [dim]({escape(faults[0].code)})[/]" if len(faults) == 1 and faults[0].code != error.code else ""
    console.print(f"[bold red]error[/] [red]{escape(error.code)}[/]: {escape(message)}{code}", soft_wrap=True)
    if several or (faults and not _repeats(error, faults[0])):
        for fault in faults:
            where = f"[bold]{escape(fault.field)}[/]: " if fault.field else ""
            console.print(f"  - {where}{escape(fault.message)} [dim]({escape(fault.code)})[/]", soft_wrap=True)
    if error.field and not faults and error.field not in error.message:
        console.print(f"  field: {escape(error.field)}", soft_wrap=True)
    if isinstance(error, ApiError) and error.request_id:
        console.print(f"  [dim]request id: {escape(error.request_id)}[/]", soft_wrap=True)


def _repeats(error: EftClientError, fault: Fault) -> bool:
    """The message of an error with faults is often its first fault: then it is told once."""
    return fault.message in error.message


def status_markup(status: str) -> str:
    return f"[{STATUS_STYLE.get(status, 'white')}]{escape(status)}[/]"


NAME_WIDTH = 24
"""Characters of a name that a terminal shows in a table."""
SHORT_ID = 12
"""Characters of an id that a terminal shows: its time to the millisecond, and two of chance. Commands take them."""


def short_id(text: str, console: Console) -> str:
    """Without its kind, and only its beginning, where a person reads; whole in a pipe, for scripts."""
    return text.partition("-")[2][:SHORT_ID] if console.is_terminal else text


def name_width(console: Console) -> int | None:
    return NAME_WIDTH if console.is_terminal else None


def jobs_table(jobs: list[Job], console: Console) -> Table:
    width = console.width
    columns: list[tuple[str, int, Callable[[Job], str]]] = [
        ("ID", 0, lambda job: short_id(job.id, console)),
        ("NAME", 60, lambda job: escape(job.name or "")),
        *([("TAGS", 90, lambda job: escape(" ".join(job.tags)))] if any(job.tags for job in jobs) else []),
        ("STATUS", 0, lambda job: status_markup(job.status)),
        ("PROGRESS", 0, progress_words),
        ("AGE", 70, lambda job: age(job.created_at)),
        ("REASON", 120, lambda job: escape(job.reason or "")),
    ]  # each from its width of the terminal on
    shown = [(name, cell) for name, least, cell in columns if width >= least]
    gives_way = console.is_terminal and shown[-1][0] == "REASON"
    table = Table(box=None, pad_edge=False, expand=gives_way)
    for name, _ in shown:
        most = name_width(console) if name == "NAME" else None
        ratio = 1 if gives_way and name == "REASON" else None
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=most, ratio=ratio)
    for job in jobs:
        table.add_row(*(cell(job) for _, cell in shown))
    return table


def files_table(files: list[File], console: Console) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("ID", "ROWS", "SIZE", "NAME", "FORMAT")[: 5 if console.width >= 70 else 4]:
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", justify="right" if name in ("ROWS", "SIZE") else "left"
        )
    for file in files:
        rows = "" if file.rows is None else str(file.rows)
        cells = [short_id(file.id, console), rows, size(file.bytes), escape(file.filename), escape(file.format or "")]
        table.add_row(*cells[: len(table.columns)])
    return table


def job_lines(job: Job) -> list[str]:
    """`eft show`, as markup."""
    place = job.queue or {}
    told = job.failure is not None and " ".join(job.failure.message.split()) == job.reason
    rows: list[tuple[str, str | None]] = [
        ("id", job.id),
        ("name", job.name),
        ("tags", escape(" ".join(job.tags)) or None),
        ("note", job.note and escape(job.note)),
        ("archived", shown(job.raw.get("archived_at"))),
        ("status", status_markup(job.status)),
        ("reason", None if told else job.reason and escape(job.reason)),
        ("queue", escape(place.get("reason") or "")),
        ("starts about", shown(place.get("estimated_start"))),
        ("attempts", str(job.tries) if job.tries > 1 else ""),
        ("node", job.node and escape(job.node)),
        ("slots", escape(", ".join(job.slots)) or None),
        ("created", shown(job.created_at)),
        ("started", shown(job.started_at)),
        ("finished", shown(job.finished_at)),
        ("progress", progress_words(job) or None),
    ]
    if job.settled is not None:
        rows.append(("method: auto", escape(f"{job.settled['rung']} ({job.settled['reason']})")))
        rows += [("", escape(f"not {one['rung']}: {one['reason']}")) for one in job.settled["rejected"]]
    if job.failure is not None:
        rows.append(("failure", f"[red]{escape(job.failure.code)}[/] ({escape(job.failure.failure_class)})"))
        rows.append(("", escape(job.failure.message)))
        rows.append(("field", job.failure.field and escape(job.failure.field)))
    rows += [(name, escape(plain(value))) for name, value in (job.result or {}).items()]
    return [f"[dim]{label:<18}[/]{value}" for label, value in rows if value]


def progress_words(job: Job) -> str:
    if job.progress is None:
        return ""
    return f"{job.progress.step}/{job.progress.total_steps}"


def plain(value: Any) -> str:
    """A value of an answer, as people write it; "" for what is not there."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {words}" for key, item in value.items() if (words := plain(item)))
        case list():
            return "; ".join(filter(None, map(plain, value)))
        case _:
            return number(value)


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def age(timestamp: str) -> str:
    try:
        then = datetime.fromisoformat(timestamp)
    except ValueError:
        return timestamp
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return duration((datetime.now(UTC) - then).total_seconds())
