"""One frame of `eft watch`: pure, from what is known and the size of the terminal to lines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from eft.terminal.output import STATUS_STYLE, age, duration, number, size
from eft.terminal.sanitize import segment
from eft.times import clock
from eft.types import Job
from eft.watch.keys import Keys
from eft.watch.plot import LEAST_HEIGHT, plot
from eft.watch.world import JOBS, QUEUE, Line, Watched, World

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""A sparkline's heights; the second where the terminal's encoding has not the first."""
WIDE = 100
"""From this width on there is room for what one can do without."""
PLOT_LINES = 14
"""Lines of a curve at most, with its title and both axes."""
EVENT_LINES = 8
"""Lines that are left to events before anything grows beyond what it needs."""
GPU_STYLE = {"free": "green", "busy": "cyan", "held": "yellow", "drained": "magenta", "maintenance": "magenta"}


class Frame:
    """Fills the terminal that it is printed on, to its last line."""

    def __init__(self, world: World, address: str, *, now: float | None = None, keys: Keys | None = None) -> None:
        self.world, self.address, self.keys = world, address, keys
        self.now = time.monotonic() if now is None else now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        lines: list[list[Segment]] = []
        for part in self._parts(console, width, height):
            lines += console.render_lines(part, options.update(width=width, height=None), pad=False)
        foot = console.render_lines(
            self._foot(console.encoding.startswith("utf")), options.update(width=width, height=None), pad=False
        )
        blank = [[Segment("")] for _ in range(max(0, height - len(lines) - 1))]
        for number_, line in enumerate([*lines[: height - 1], *blank, *foot[:1]]):
            if number_:
                yield Segment.line()
            yield from map(segment, line)

    def _parts(self, console: Console, width: int, height: int) -> list[Any]:
        world = self.world
        parts: list[Any] = [self._head()]
        if not world.looked:
            return [*parts, Text(""), Text("waiting for the server's first answer …", style="dim")]
        room = height - 2  # head and foot
        utf8 = console.encoding.startswith("utf")
        chosen = None if self.keys is None else self.keys.chosen(world)
        mark = "›" if utf8 else ">"
        if world.one is not None and world.jobs:
            section = _one(world.jobs[0], width, utf8, console)
            parts, room = [*parts, *section], room - len(section)
        else:
            jobs = _jobs(world.jobs, width, utf8, room // 2, chosen, mark)
            parts, room = [*parts, *jobs[0]], room - jobs[1]
        names = world.names()
        gpus = _gpus(world.gpus, width, max(2, room // 3), names)
        parts, room = [*parts, *gpus[0]], room - gpus[1]
        if world.one is None:
            for lines, used in (
                _queue(world.queue, width, max(2, room // 2), chosen, mark),
                _ended(world.ended, width, (room - EVENT_LINES) // 2, chosen, mark),
            ):
                parts, room = [*parts, *lines], room - used
        curve = _curve(world, chosen, width, room - EVENT_LINES, utf8)
        parts, room = [*parts, *curve], room - len(curve)
        return [*parts, *_lines(world.lines, room, world.one is None, names)]

    def _head(self) -> Text:
        world = self.world
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append("eft watch ", style="bold")
        words.append(world.one or "", style="bold")
        if world.one is None and world.looked:
            words.append(f"{_count(world.jobs, JOBS)} at work, {_count(world.queue, QUEUE)} waiting")
            if world.ended:
                last = world.ended[0]
                words.append(f"; last: {last.name or last.id} ")
                words.append(last.status, style=STATUS_STYLE.get(last.status, ""))
        if world.away_since is not None:
            gone = duration(self.now - world.away_since)
            words = Text(no_wrap=True, overflow="ellipsis")
            words.append(f" server away for {gone}, trying again ", style="bold reverse red")
            words.append(f" {world.away_why}", style="red")
        return words

    def _foot(self, utf8: bool) -> Text:
        keys, world = self.keys, self.world
        if keys is None:
            return Text(f"q quit  {self.address}", style="dim", no_wrap=True, overflow="ellipsis")
        if keys.question is not None:
            name = world.names().get(keys.question, keys.question)
            return Text(f"cancel {name}? y: yes, any other key: no", style="bold", no_wrap=True, overflow="ellipsis")
        words = ["q quit", "bksp back"] if keys.opened else ["q quit"]
        words += [] if world.one is not None else ["↑↓ select" if utf8 else "j/k select", "enter open"]
        words += ["p pause", "r resume", "c cancel"]
        return Text("  ".join([*words, self.address]), style="dim", no_wrap=True, overflow="ellipsis")


def _count(rows: Sequence[Any], asked: int) -> str:
    """Behind as many as were asked for there may be more."""
    return f"{asked}+" if len(rows) >= asked else str(len(rows))


def _title(words: str) -> Text:
    return Text(words, style="bold yellow", no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], width: int, utf8: bool = True) -> str:
    """The last `width` buckets of a curve, each the mean of its finite values; a blank where there is none."""
    if not values or width <= 0:
        return ""
    count = min(width, len(values))
    edges = [round(len(values) * at / count) for at in range(count + 1)]
    means: list[float | None] = []
    for low, high in pairwise(edges):
        finite = [value for value in values[low:high] if value is not None and math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low_, high_ = min(known), max(known)
    heights = BARS if utf8 else PLAIN_BARS
    span = (high_ - low_) or 1.0
    return "".join(
        " " if mean is None else heights[min(len(heights) - 1, int((mean - low_) / span * len(heights)))]
        for mean in means
    )


def _width(cells: Sequence[str], width: int) -> int:
    """Width of a column whose cells may be cut, in characters."""
    return min(30 if width >= WIDE else 18, max(map(cell_len, cells), default=0))


def _status(job: Job) -> Text:
    return Text(job.status, style=STATUS_STYLE.get(job.status, ""))


def _bar(job: Job, width: int) -> Any:
    progress = job.progress
    if progress is None or not progress.total_steps:
        return Text("")
    return ProgressBar(total=progress.total_steps, completed=progress.step, width=width)


def _left(job: Job) -> str:
    progress = job.progress
    if progress is None or progress.seconds_left is None or job.finished:
        return ""
    return f"{duration(progress.seconds_left)} left"


def _loss(watched: Watched) -> str:
    last = next((value for value in reversed(watched.loss) if value is not None), None)
    return "" if last is None else f"{last:.3f}"


def _marked(job_id: str | None, chosen: str | None, mark: str) -> Text:
    return Text(mark if chosen is not None and job_id == chosen else " ", style="bold cyan")


def _jobs(
    jobs: Sequence[Watched], width: int, utf8: bool, room: int, chosen: str | None, mark: str
) -> tuple[list[Any], int]:
    if not jobs:
        return [Text(""), Text("nothing is at work", style="dim")], 2
    wide = width >= WIDE
    bar = 12 if wide else 8
    spark = max(8, min(40, (width - 80) if wide else 10))
    table = Table.grid(padding=(0, 1))
    shown = list(jobs)[: max(1, room - 2)]
    names = [one.job.name or (one.job.id if wide else one.job.id[-10:]) for one in shown]
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", width=_width(names, width))
    for name, one in zip(names, shown, strict=True):
        job, progress = one.job, one.job.progress
        share = "" if progress is None or not progress.total_steps else f"{progress.step / progress.total_steps:4.0%}"
        cells = [
            (0, _marked(job.id, chosen, mark)),
            (0, Text(name)),
            (0, _status(job)),
            (60, _bar(job, bar)),
            (0, Text(share)),
            (40, Text(_loss(one))),
            (70, Text(sparkline(one.loss, spark, utf8), style="cyan")),
            (50, Text(_left(job))),
        ]  # each from its width of the terminal on
        table.add_row(*(cell for least, cell in cells if width >= least))
    more = f" ({len(shown)} of {_count(jobs, JOBS)})" if len(shown) < len(jobs) else ""
    return [Text(""), _title(f"At work{more}"), table], 2 + len(shown)


def _one(watched: Watched, width: int, utf8: bool, console: Console) -> list[Any]:
    """Every part is one line."""
    job, progress = watched.job, watched.job.progress
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(job.name or "", style="bold")
    head.append("  " if job.name else "")
    head.append_text(_status(job))
    reason = (job.queue or {}).get("reason") or job.reason
    head.append(f": {reason}" if reason else "")
    parts: list[Any] = [head]
    facts = [
        ("attempt", str(job.tries) if job.tries > 1 else ""),
        ("on", ", ".join(job.raw.get("slots") or ()) or job.node or ""),
        ("model", _model(job)),
        ("method", str((job.spec.get("method") or {}).get("type", ""))),
        ("for", age(job.started_at or job.created_at) if not job.finished else ""),
    ]
    parts.append(
        Text("  ".join(f"{name} {value}" for name, value in facts if value), "dim", no_wrap=True, overflow="ellipsis")
    )
    if progress is not None and progress.total_steps:
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        words = [f"{progress.step}/{progress.total_steps}", _left(job)]
        if watched.tokens_per_second is not None:
            words.append(f"{watched.tokens_per_second:,.0f} tokens/s".replace(",", " "))
        row.add_row(_bar(job, max(10, min(60, width - 45))), "  ".join(word for word in words if word))
        parts.append(row)
    if watched.loss:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"loss {_loss(watched)} ")
        line.append(sparkline(watched.loss, max(10, min(80, width - 45)), utf8), style="cyan")
        finite = [value for value in watched.loss if value is not None and math.isfinite(value)]
        if finite:
            line.append(f" {number(min(finite))} to {number(max(finite))}", style="dim")
        parts.append(line)
    if watched.evaluation:
        parts.append(Text(watched.evaluation, no_wrap=True, overflow="ellipsis"))
    return parts


def _model(job: Job) -> str:
    model = job.spec.get("model") or {}
    return str(model.get("id") or model.get("path") or "") if isinstance(model, dict) else str(model)


def _ended(jobs: Sequence[Job], width: int, room: int, chosen: str | None, mark: str) -> tuple[list[Any], int]:
    """The newest jobs that have ended or are paused, with what they came to."""
    if not jobs or room < 3:
        return [], 0
    wide = width >= WIDE
    table = Table.grid(padding=(0, 1), expand=True)
    shown = list(jobs)[: room - 2]
    names = [job.name or (job.id if wide else job.id[-10:]) for job in shown]
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", width=_width(names, width))
    for _ in range(3 if wide else 2):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, job in zip(names, shown, strict=True):
        took = _took(job)
        ago = f"{age(job.finished_at)} ago" if job.finished_at else ""
        cells = [_marked(job.id, chosen, mark), Text(name), _status(job), *([Text(took)] if wide else []), Text(ago)]
        table.add_row(*cells, Text(_outcome(job)))
    return [Text(""), _title("Ended or paused"), table], 2 + len(shown)


def _took(job: Job) -> str:
    if not job.started_at or not job.finished_at:
        return ""
    whole = datetime.fromisoformat(job.finished_at) - datetime.fromisoformat(job.started_at)
    return duration(whole.total_seconds())


def _outcome(job: Job) -> str:
    """The figures of a result, or why there is none."""
    result = job.result or {}
    before, after = result.get("eval_before") or {}, result.get("eval_after") or {}
    words = [f"train_loss {number(result['train_loss'])}"] if result.get("train_loss") is not None else []
    for name, value in after.items():
        if isinstance(value, int | float):
            first = before.get(name)
            words.append(
                f"{name} {number(first)} to {number(value)}" if first is not None else f"{name} {number(value)}"
            )
    return "  ".join(words) or (job.reason or "")


def _curve(world: World, chosen: str | None, width: int, room: int, utf8: bool) -> list[Any]:
    """The loss of the chosen job, or of the first one, with axes; every part is one line."""
    if world.one is None and width < WIDE:
        return []
    found = next((one for one in world.jobs if one.job.id == chosen), None)
    found = found or next((one for one in world.jobs if len(one.steps) > 1), None)
    if found is None or room < LEAST_HEIGHT + 2:
        return []
    points = list(zip(found.steps, found.loss, strict=True))
    lines = plot(points, min(width, 120), min(room, PLOT_LINES) - 2, utf8)
    if not lines:
        return []
    title = "Loss" if world.one is not None else f"Loss of {found.job.name or found.job.id}"
    return [Text(""), _title(title), *(Text(line, style="cyan", no_wrap=True) for line in lines)]


def _gpus(gpus: Sequence[dict[str, Any]], width: int, room: int, names: Mapping[str, str]) -> tuple[list[Any], int]:
    if not gpus or room < 2:
        return [], 0
    wide = width >= WIDE
    table = Table.grid(padding=(0, 1), expand=True)
    for column in range(6):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1 if column == 5 else None)
    shown = list(gpus)[: room - 2] or list(gpus)[:1]
    for row in shown:
        busy, used, total = row.get("busy_percent"), row.get("used_bytes"), row.get("memory_bytes")
        memory = f"{size(used)} of {size(total)}" if used is not None and total else size(total) if total else ""
        job = row.get("job")
        whose = (
            names.get(str(job), job) or row.get("reason") or ("another project" if row.get("state") == "busy" else "")
        )
        table.add_row(
            Text(str(row["gpu"])),
            Text(str(row["state"]), style=GPU_STYLE.get(str(row["state"]), "red")),
            Text("") if busy is None else ProgressBar(total=100, completed=busy, width=12 if wide else 6),
            "" if busy is None else f"{busy:3.0f}%",
            Text(memory),
            Text(str(whose)),
        )
    title = "GPUs" if any(row.get("kind") == "gpu" for row in gpus) else "Slots"
    more = f" ({len(shown)} of {len(gpus)})" if len(shown) < len(gpus) else ""
    return [Text(""), _title(f"{title}{more}"), table], 2 + len(shown)


def _queue(
    rows: Sequence[dict[str, Any]], width: int, room: int, chosen: str | None, mark: str
) -> tuple[list[Any], int]:
    if not rows or room < 3:
        return [], 0
    table = Table.grid(padding=(0, 1), expand=True)
    shown = list(rows)[: room - 2]
    names = [row["name"] or row["job"] or "another project's" for row in shown]
    owners = [row["owner"] or "" for row in shown]
    starts = [clock(row["estimated_start"]) for row in shown]
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, width=max(len(str(row["position"] or "-")) for row in shown))
    for column in (names, owners, starts):
        table.add_column(no_wrap=True, overflow="ellipsis", width=_width(column, width))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row, name, owner, start in zip(shown, names, owners, starts, strict=True):
        table.add_row(
            _marked(row["job"], chosen, mark),
            Text(str(row["position"]) if row["position"] is not None else "-"),
            Text(name),
            Text(owner),
            Text(start),
            Text(row["reason"]),
        )
    more = f" ({len(shown)} of {_count(rows, QUEUE)})" if len(shown) < len(rows) else ""
    return [Text(""), _title(f"Waiting{more}"), table], 2 + len(shown)


def _lines(lines: Sequence[Line], room: int, named: bool, names: Mapping[str, str]) -> list[Any]:
    if not lines or room < 3:
        return []
    parts: list[Any] = [Text(""), _title("Events")]
    for line in lines[-(room - 2) :]:
        words = Text(f"{line.at:%H:%M:%S} ", style="dim", no_wrap=True, overflow="ellipsis")
        if named and line.job is not None:
            words.append(f"{names.get(line.job, line.job[-10:])} ", style="cyan")
        words.append(line.words.replace("\n", " "), style="default")
        parts.append(words)
    return parts
