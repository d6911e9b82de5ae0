"""`eft sweep …`: one job with other values, run by run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.commands.models.several import print_head, print_id, print_status, show_end
from eft.commands.waiting import PatienceOption
from eft.jobfile import StandIns, Uploader, upload_data
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, number, short_id, status_markup
from eft.types import Sweep

if TYPE_CHECKING:
    from eft.client import Client

app = App(no_args_is_help=True, help="One job with other values, run by run (docs/sweeps.md).")

SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help=f"A sweep: {HANDLE}.")]


def submit_sweep(
    client: Client,
    output: Output,
    document: dict[str, Any],
    folder: Path,
    given: dict[str, Path],
    *,
    upload: Uploader,
    wait: bool,
    dry_run: bool,
    key: str | None,
    patience: float,
) -> None:
    """`eft submit` of a file with `sweep`. What is wrong with a run is told before any file goes up."""
    stand_ins = StandIns(client)
    found = client.sweeps.resolve(upload_data(document, folder, given, stand_ins))
    if dry_run:
        stand_ins.tell(output.note)
        if output.as_json:
            output.json(found)
            return
        count = f"{found['runs']} run{'' if found['runs'] == 1 else 's'}"
        output.note(f"{count}, compared by {found['sweep']['metric']}; the first one:")
        output.data.print_json(data=found["first"])
        return
    document = upload_data(document, folder, given, upload)
    made = client.sweeps.submit(document, idempotency_key=key or uuid.uuid4().hex)
    if not wait:
        print_id(output, made)
        return
    output.note(f"sweep {made.id}, {len(made.runs)} runs")
    _follow(client, output, made.id, patience)


def _follow(client: Client, output: Output, sweep_id: str, patience: float) -> None:
    show_end(output, lambda: client.sweeps.wait(sweep_id, patience=patience), _show)


def _show(output: Output, found: Sweep) -> None:
    """The runs, the best ones first, with the best one marked."""
    if output.as_json:
        output.json(found.raw)
        return
    print_head(output, found)
    spec = found.raw["sweep"]
    fields = list(spec["fields"])
    table = Table(box=None, pad_edge=False)
    for column in ("", "JOB", "STATUS", *fields, spec["metric"]):
        table.add_column(column, no_wrap=True)
    sign = 1 if spec["goal"] == "min" else -1
    for run in sorted(found.runs, key=lambda run: (run["value"] is None, sign * (run["value"] or 0.0))):
        values = [escape(number(run["point"].get(name, ""))) for name in fields]
        value = "" if run["value"] is None else number(run["value"])
        job = short_id(run["job"], output.data)
        table.add_row("*" if run["best"] else "", job, status_markup(run["status"]), *values, value)
    output.data.print(table)


@app.command("ls")
@manual(examples=[("eft sweep ls", "List sweeps.")])
def list_sweeps(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="Maximum number, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the project's sweeps, newest first."""
    with session(as_json, url) as (client, output):
        found = client.sweeps.all(limit=limit)
        if as_json:
            output.json({"data": [one.raw for one in found]})
            return
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "STATUS", "RUNS", "NAME", "REASON"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for one in found:
            cells = (str(len(one.runs)), escape(one.name or ""), escape(one.reason or ""))
            table.add_row(short_id(one.id, output.data), status_markup(one.status), *cells)
        output.table(table, "sweeps")


@app.command("show")
@manual(examples=[("eft sweep show last", "The runs of your newest sweep, the best one first.")])
def show_sweep(sweep: SweepArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the runs of a sweep with their values and results; a star marks the best one."""
    with session(as_json, url) as (client, output):
        _show(output, client.sweeps.get(sweep))


@app.command("wait")
@manual(examples=[("eft sweep wait last", "Wait for the end of all runs.")])
def wait_sweep(
    sweep: SweepArgument, patience: PatienceOption = 300.0, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Wait until all runs of a sweep have ended, and show them."""
    with session(as_json, url) as (client, output):
        _follow(client, output, client.sweeps.get(sweep).id, patience)


@app.command("cancel")
@manual(examples=[("eft sweep cancel last", "Cancel all runs that have not ended.")])
def cancel_sweep(sweep: SweepArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Cancel all runs of a sweep that have not ended."""
    with session(as_json, url) as (client, output):
        print_status(output, client.sweeps.cancel(sweep))


@app.command("delete")
@manual(examples=[("eft sweep delete last", "Delete it; its jobs stay.")])
def delete_sweep(sweep: SweepArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Delete an ended sweep. Its jobs stay."""
    with session(as_json, url) as (client, output):
        answer = client.sweeps.delete(sweep)
        output.json(answer) if as_json else output.text(f"{answer['id']} deleted\n")
