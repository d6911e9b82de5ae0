"""`eft gpu …`, `eft maintenance …`: people and eft on the same GPUs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, size
from eft.times import point, shown

gpu = App(no_args_is_help=True, help="Show GPUs; hold them for people, release them.")
maintenance = App(no_args_is_help=True, help="Maintenance windows of nodes; for admins of the box.")
GpuArguments = Annotated[
    list[str], typer.Argument(metavar="GPU...", help="NODE/INDEX, or INDEX where one node has it.")
]
WhyOption = Annotated[str, typer.Option(help="Reason, shown with waiting jobs.")]
STATE_STYLE = {"free": "green", "busy": "cyan", "held": "yellow", "drained": "magenta", "maintenance": "magenta"}


@gpu.command("list")
@manual(examples=[("eft gpu list", "Show the user of each GPU.")])
def list_gpus(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List every GPU (or CPU slot) and its user: a job, a hold, or another process."""
    with session(as_json, url) as (client, output):
        rows = client.queue.gpus()
        if as_json:
            output.json({"data": rows})
            return
        table = Table(box=None, pad_edge=False)
        for name in ("GPU", "STATE", "MEMORY", "ARCH", "NAME", "WHO"):
            table.add_column(name, no_wrap=name != "WHO")
        for row in rows:
            style = STATE_STYLE.get(row["state"], "red")
            who = row["job"] or row["reason"] or ("a job of another project" if row["state"] == "busy" else "")
            table.add_row(
                escape(row["gpu"]),
                f"[{style}]{escape(row['state'])}[/]",
                size(row["memory_bytes"]) if row["memory_bytes"] else "",
                escape(row["arch"]),
                escape(row["name"] if row["kind"] == "gpu" else ""),
                escape(who),
            )
        output.table(table, "GPUs")


@gpu.command()
@manual(
    examples=[
        ("eft gpu hold 3 --until 18:00 --for bob --why notebook", "Hold a GPU until the evening."),
        ("eft gpu hold box-1/0 --now", "Immediately; its job continues elsewhere."),
    ]
)
def hold(
    gpus: GpuArguments,
    until: Annotated[str | None, typer.Option(help="18:00, 2h, 2026-11-22T08:00. Default: until released.")] = None,
    held_for: Annotated[str, typer.Option("--for", help="User of the GPU.")] = "",
    why: WhyOption = "",
    now: Annotated[bool, typer.Option("--now", help="Its job writes a checkpoint and continues elsewhere.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold GPUs for people. On a busy GPU the hold begins when its job ends, or immediately with --now."""
    with session(as_json, url) as (client, output):
        end = None if until is None else point(until, option="--until")
        _tell(output, client.queue.hold(gpus, until=end, held_for=held_for, why=why, now=now))


@gpu.command()
@manual(examples=[("eft gpu release 3", "Release it.")])
def release(gpus: GpuArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """End the hold of GPUs."""
    with session(as_json, url) as (client, output):
        _tell(output, client.queue.release(gpus))


@gpu.command()
@manual(examples=[("eft gpu drain box-1/2 --why 'fan is loud'", "Take it out of service until undrain.")])
def drain(gpus: GpuArguments, why: WhyOption = "", url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Take GPUs out of service; their jobs continue elsewhere. For admins of the box."""
    with session(as_json, url) as (client, output):
        _tell(output, client.queue.drain(gpus, why=why))


@gpu.command()
@manual(examples=[("eft gpu undrain box-1/2", "Put it back into service.")])
def undrain(gpus: GpuArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Put GPUs back into service. For admins of the box."""
    with session(as_json, url) as (client, output):
        _tell(output, client.queue.undrain(gpus))


@gpu.command()
@manual(examples=[("eft gpu history box-1/0 -n 50", "Show its last 50 jobs and holds.")])
def history(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="NODE/INDEX.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the past uses of a GPU, newest first."""
    with session(as_json, url) as (client, output):
        rows = client.queue.history(gpu, limit=limit)
        if as_json:
            output.json({"data": rows})
            return
        table = Table(box=None, pad_edge=False)
        for name in ("FROM", "UNTIL", "WHAT", "BY", "WHY"):
            table.add_column(name, no_wrap=name != "WHY")
        for row in rows:
            what = row["job"] or ("a job of another project" if row["what"] == "job" else row["what"])
            cells = (row["since"][:19], (row["until"] or "now")[:19], what, row["by"] or "", row["why"] or "")
            table.add_row(*map(escape, cells))
        output.table(table, "entries")


def _tell(output: Output, holds: list[dict[str, Any]]) -> None:
    if output.as_json:
        output.json({"data": holds})
        return
    for row in holds:
        until = f" until {shown(row['until'])}" if row["until"] and not row["released_at"] else ""
        state = "released" if row["released_at"] else {"hold": "held", "drain": "drained"}[row["kind"]]
        whose = f" for {row['for']}" if row["for"] else ""
        output.text(f"{row['gpu']} {state}{until}{whose}\n")


@maintenance.command("list")
@manual(examples=[("eft maintenance list", "List planned maintenance.")])
def list_maintenance(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List planned maintenance."""
    with session(as_json, url) as (client, output):
        rows = client.queue.maintenance()
        if as_json:
            output.json({"data": rows})
        for row in [] if as_json else rows:
            output.text(f"{_words(row)}\n")


@maintenance.command("plan")
@manual(
    examples=[
        (
            "eft maintenance plan box-1 --from 2026-12-01T08:00 --until 2026-12-01T10:00 --why 'new kernel'",
            "Two hours on one box.",
        )
    ]
)
def plan_maintenance(
    start: Annotated[str, typer.Option("--from", help="18:00, 2h, 2026-11-22T08:00.")],
    until: Annotated[str, typer.Option(help="The same.")],
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="Default: all of them.")] = None,
    why: WhyOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan maintenance: no job whose time limit extends into it starts; jobs still running then continue later or
    elsewhere."""
    with session(as_json, url) as (client, output):
        row = client.queue.plan_maintenance(
            point(start, option="--from"), point(until, option="--until"), node=node, why=why
        )
        output.json(row) if as_json else output.text(f"{_words(row)}\n")


@maintenance.command("cancel")
@manual(examples=[("eft maintenance cancel maint-01kar3v8x5m2h6n9qst4wyz0bc", "Cancel it.")])
def cancel_maintenance(
    maintenance_id: Annotated[str, typer.Argument(metavar="ID", help="`eft maintenance list` shows it.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel or end planned maintenance."""
    with session(as_json, url) as (client, output):
        row = client.queue.cancel_maintenance(maintenance_id)
        output.json(row) if as_json else output.text(f"{row['id']} cancelled\n")


def _words(row: dict[str, Any]) -> str:
    why = f": {row['why']}" if row["why"] else ""
    return f"{row['id']}  {row['node'] or 'all nodes'}  {row['from'][:16]}Z to {row['until'][:16]}Z{why}"
