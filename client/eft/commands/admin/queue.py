"""`eft queue`, `eft usage`, `eft quota …`: the order, who has used how much, and what each may use."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, age, name_width, short_id, size
from eft.times import clock, zone

quota = App(no_args_is_help=True, help="Quotas, priorities and shares of projects and owners.")
NONE = "none"
"""What `eft quota set` takes for: no quota."""
_TITLES = {
    "shares": "SHARES",
    "max_priority": "PRIORITY",
    "max_running": "RUNNING",
    "max_queued": "QUEUED",
    "max_previews": "PREVIEWS",
    "max_sessions": "SESSIONS",
    "max_adapters": "ADAPTERS",
    "session_hours_week": "SESSION HOURS/WEEK",
    "session_bytes": "SESSION DISK",
    "gpu_hours_week": "GPU HOURS/WEEK",
    "disk_bytes": "DISK",
    "preemptible": "PREEMPTIBLE",
}
"""Quotas in their order, with the heads of their columns; a column that nobody has is left out."""
_GIGABYTES = {"disk_bytes": "--disk-gb", "session_bytes": "--session-gb"}
"""Quotas that are given in GB, by their options."""


@manual(examples=[("eft queue", "Show the order and the reasons.")])
def queue(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number.")] = 100,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List waiting jobs in queue order, with reasons and estimated starts."""
    with session(as_json, url) as (client, output):
        rows, more = client.queue.look(limit=limit)
        if as_json:
            output.json({"data": rows, "more": more})
            return
        output.table(waiting(rows, output.data), "jobs wait")
        if more:
            output.note(f"{more} more wait{'s' if more == 1 else ''}: --limit shows up to 1000")


def waiting(rows: list[dict[str, Any]], console: Console) -> Table:
    """The waiting jobs as a table: a line for each on a terminal, on which the reason alone gives way."""
    # In a pipe nothing is cut.
    narrow = console.is_terminal
    table = Table(box=None, pad_edge=False, expand=narrow)
    right = ("", "PRIO")
    for name in ("", "JOB", "NAME", "OWNER", "PRIO", "WAITS", f"STARTS {zone()}", "WHY"):
        most = name_width(console) if name in ("NAME", "OWNER") else None
        justify: Literal["left", "right"] = "right" if name in right else "left"
        ratio = 1 if narrow and name == "WHY" else None
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify=justify, max_width=most, ratio=ratio)
    for row in rows:
        place = str(row["position"]) if row["position"] is not None else "-"
        job = short_id(row["job"], console) if row["job"] else "[dim]another's[/]"
        cells = [place, job, escape(row["name"] or ""), escape(row["owner"] or ""), str(row["priority"])]
        cells += [age(row["waiting_since"]), clock(row["estimated_start"]), escape(row["reason"])]
        table.add_row(*cells)
    return table


@manual(examples=[("eft usage --since 2026-11-01 --until 2026-11-30 --csv", "One month as CSV.")])
def usage(
    since: Annotated[
        str | None, typer.Option(help="First day, e.g. 2026-11-15. Default: six days before the last.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Last day. Default: today (UTC).")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report GPU hours, jobs and disk by owner and project: your project, or all for an admin of the box."""
    if csv and as_json:
        raise UsageFault("--csv or --json, not both")
    with session(as_json, url) as (client, output):
        if csv:
            output.text(client.queue.usage_csv(since=since, until=until))
            return
        report = client.queue.usage(since=since, until=until)
        if as_json:
            output.json(report)
            return
        output.note(f"{report['since']} to {report['until']} (UTC)")
        _table(
            output,
            ("OWNER", "PROJECT", "GPU HOURS", "CPU HOURS", "RUNNING", "QUEUED", "DISK", "COUNTS"),
            [
                (
                    row["owner"],
                    row["project"],
                    f"{row['gpu_hours']:.2f}",
                    f"{row['cpu_hours']:.2f}",
                    str(row["running"]),
                    str(row["queued"]),
                    size(row["disk_bytes"]),
                    f"{row['counted_hours']:.2f}",
                )
                for row in report["data"]
            ],
        )


@manual(examples=[("eft gc --dry-run", "List what would be deleted, and why.")])
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete what the retention rules allow: checkpoints of jobs that ended long ago, old previews, unused files.
    This also happens once a day. For admins of the box."""
    with session(as_json, url) as (client, output):
        answer = client.queue.collect(dry_run=dry_run)
        if as_json:
            output.json(answer)
            return
        for row in answer["data"]:
            output.text(f"{row['kind']:<12} {row['id']}  {size(row['bytes']):>10}  {row['why']}\n")
        output.note(f"{size(answer['bytes'])} {'would go' if dry_run else 'gone'}")


@quota.command("list")
@manual(examples=[("eft quota list", "Show your limits.")])
def list_quotas(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Your own and your project's; all of them for an admin of the box."""
    with session(as_json, url) as (client, output):
        rows = client.queue.limits()
        if as_json:
            output.json({"data": rows})
            return
        shown = {name: title for name, title in _TITLES.items() if any(row.get(name) is not None for row in rows)}
        _table(
            output,
            ("", "NAME", *shown.values()),
            [(row["scope"], row["name"], *(_told(name, row.get(name)) for name in shown)) for row in rows],
        )


@quota.command("set")
@manual(
    examples=[
        (
            "eft quota set project voice --max-running 2 --gpu-hours-week 100",
            "At most two running jobs and a hundred GPU hours.",
        ),
        ("eft quota set owner ada --shares 2", "Give twice the GPU time of others."),
        ("eft quota set project voice --max-running none", "Remove the limit."),
    ]
)
def set_quota(
    scope: Annotated[str, typer.Argument(help="project or owner.")],
    name: Annotated[str, typer.Argument(help="Name of the project or user.")],
    shares: Annotated[
        str | None, typer.Option(help="Shares of an owner: twice as many give twice the GPU time.")
    ] = None,
    max_priority: Annotated[str | None, typer.Option(help="Highest priority that jobs of a project may have.")] = None,
    max_running: Annotated[str | None, typer.Option(help="Maximum running jobs.")] = None,
    max_queued: Annotated[str | None, typer.Option(help="Maximum jobs considered for scheduling at once.")] = None,
    max_previews: Annotated[str | None, typer.Option(help="Maximum previews that wait or run.")] = None,
    max_sessions: Annotated[str | None, typer.Option(help="Maximum open sessions, parked ones too.")] = None,
    max_adapters: Annotated[str | None, typer.Option(help="Maximum adapters in open sessions.")] = None,
    session_hours_week: Annotated[
        str | None, typer.Option(help="Hours for which sessions hold slots, in seven days.")
    ] = None,
    session_gb: Annotated[str | None, typer.Option(help="Operations and results of sessions, in GB.")] = None,
    gpu_hours_week: Annotated[str | None, typer.Option(help="In seven days.")] = None,
    disk_gb: Annotated[str | None, typer.Option(help="Files and run folders, in GB.")] = None,
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--no-preemptible",
            help="Let running jobs of a project be preempted, with a checkpoint, for jobs of a higher priority.",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the named quotas; `none` removes one. Quotas keep jobs in the queue, with a reason; only previews and
    sessions are rejected."""
    given: dict[str, str | None] = {
        "shares": shares,
        "max_priority": max_priority,
        "max_running": max_running,
        "max_queued": max_queued,
        "max_previews": max_previews,
        "max_sessions": max_sessions,
        "max_adapters": max_adapters,
        "session_hours_week": session_hours_week,
        "session_bytes": session_gb,
        "gpu_hours_week": gpu_hours_week,
        "disk_bytes": disk_gb,
    }
    values: dict[str, float | None] = {field: _figure(field, text) for field, text in given.items() if text is not None}
    if preemptible is not None:
        values["preemptible"] = preemptible
    if not values:
        raise UsageFault("say what to set, for example --max-running 2")
    with session(as_json, url) as (client, output):
        row = client.queue.set_limits(scope, name, **values)
        output.json(row) if as_json else output.text(f"{row['scope']} {row['name']}: {_words(row)}\n")


def _figure(field: str, text: str) -> float | None:
    if text == NONE:
        return None
    try:
        figure = float(text)
    except ValueError:
        figure = math.nan
    if not math.isfinite(figure):
        option = _GIGABYTES.get(field) or f"--{field.replace('_', '-')}"
        raise UsageFault(f"{option}: {text!r} is not a number; `{NONE}` removes the quota")
    if field in _GIGABYTES:
        return round(figure * 1e9)
    return figure if field in ("shares", "gpu_hours_week", "session_hours_week") else round(figure)


def _told(name: str, figure: float | None) -> str:
    if figure is None:
        return ""
    if name == "preemptible":
        return "yes" if figure else ""
    return size(int(figure)) if name in _GIGABYTES else f"{figure:g}"


def _words(row: dict[str, Any]) -> str:
    words = [f"{name} {row[name]:g}" for name in _TITLES if name != "preemptible" and row.get(name) is not None]
    return ", ".join([*words, *(["preemptible"] if row.get("preemptible") else [])]) or "no quotas"


def _table(output: Output, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "NAME", "OWNER", "PROJECT") else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    output.table(table, "entries")
