"""`eft plan FILE`: what a job would take here, and whether it fits, before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.errors import ExitCode
from eft.jobfile import apply_settings, checked_first, read_job, uploader
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.datasheet import print_notices
from eft.terminal.output import Output, duration, size
from eft.types import File


@manual(
    examples=[
        ("eft plan job.yaml", "Show where it fits, with which method, in how many bytes."),
        (
            "eft plan job.yaml --set method=auto",
            "Show the choice of `method: auto` for each kind of slot, with reasons.",
        ),
        ("eft plan job.yaml --json | jq '.plan.places[].peak_bytes'", "Bytes for a script."),
    ],
    exits={ExitCode.USAGE: "the job fits no node (submitting it would be refused), or wrong usage or input"},
)
def plan(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Job file, YAML or JSON; - reads stdin.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field, e.g. method=qlora.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Upload this file and plan for it.")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Upload this file and hold it out.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate a job's memory, batches, disk and time for each kind of slot. Nothing is queued and no model is
    downloaded, so a model that was never prepared there has no estimate. Data files are uploaded once the job itself
    is valid."""
    with session(as_json, url) as (client, output):
        job_spec, folder = read_job(source)
        job_spec = apply_settings(job_spec, settings or [])

        def told(path: Path, file: File) -> None:
            output.note(f"{path} is {file.id} ({file.rows} rows)")

        given = {role: path for role, path in (("train", data), ("eval", evaluation)) if path is not None}
        answer = client.plan(checked_first(client, job_spec, folder, given, uploader(client, told)))
        tell_notices(output, answer)
        planned = answer.get("plan")
        if as_json:
            output.json(answer)
        elif planned is None:
            output.note(f"no plan: {answer.get('plan_reason', 'this server makes none')}")
        else:
            show(output, planned)
        if planned is not None and not planned["fits"]:
            raise typer.Exit(ExitCode.USAGE)


def tell_notices(output: Output, answer: dict[str, Any]) -> None:
    """What is not wrong with a job, but to be known."""
    for notice in answer.get("notices") or ():
        output.note(f"notice: {notice['message']}")


def show(output: Output, planned: dict[str, Any]) -> None:
    """A plan as tables: what the job is, each kind of slot, and the bytes of the first that takes it."""
    batch, disk = planned["batch"], planned["disk"]
    bound = "counted by a preview" if planned["longest_row_from"] == "preview" else "the bound of max_length"
    steps = f"{batch['steps']} steps" if batch["steps"] is not None else "steps not known"
    free = "" if disk["free"] is None else f" of {size(disk['free'])} free"
    facts = [
        ("model", f"{planned['parameters'] / 1e6:.4g} M parameters ({planned['model_from']})"),
        ("longest row", f"{planned['longest_row']} tokens ({bound})"),
        ("batch", f"{batch['field']} = {batch['micro_batch']}, {batch['per_step']} a step"),
        ("steps", f"{steps} ({batch['steps_from']})"),
        ("disk", f"{size(disk['total_bytes'])}{free}: {_kinds(disk['bytes'])}"),
    ]
    for name, words in facts:
        output.data.print(f"[dim]{name:<12}[/]{escape(words)}", soft_wrap=True)
    output.data.print()
    output.data.print(_places(planned["places"]))
    for place in planned["places"]:
        _show_place(output, place)
    print_notices(planned, output.data)
    if not planned["fits"]:
        output.data.print(f"\n[bold red]fits nowhere[/]: {escape(planned['reason'])}", soft_wrap=True)


def _places(places: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("SLOTS", "DEVICE", "MEMORY", "FITS", "METHOD", "PEAK", "HOST", "TIME"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("MEMORY", "PEAK", "HOST") else "left")
    for place in places:
        seconds = place["time"]["seconds"]
        fits = "[green]yes[/]" if place["fits"] else "[red]no[/]"
        table.add_row(
            escape(_slots(place)),
            escape(place["arch"] or place["kind"]),
            "?" if place["memory_bytes"] is None else size(place["memory_bytes"]),
            fits if place["adjusted"] is None or not place["fits"] else "[yellow]in smaller batches[/]",
            escape(_method(place["method"])),
            size(place["peak_bytes"]),
            size(place["host_bytes"]),
            "?" if seconds is None else f"about {duration(seconds)}",
        )
    return table


def _slots(place: dict[str, Any]) -> str:
    names = place["slots"]
    if not names:
        return "(none here)"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _method(method: dict[str, Any]) -> str:
    words = [method["type"]]
    words += [f"over {method['quantization']}"] if method["quantization"] not in ("none", "nf4") else []
    words += [f"streamed ({method['stream']})"] if method["stream"] != "none" else []
    words += ["checkpointed"] if method["gradient_checkpointing"] else []
    return " ".join(words)


def _show_place(output: Output, place: dict[str, Any]) -> None:
    """What stands behind a row of the table."""
    lines = [f"on the device, when the {place['moment']}: {_kinds(place['bytes'])}"]
    lines += [f"beside it: {_kinds(place['host'])}"] if place["host"] else []
    method = place["method"]
    if method["rung"] is not None:
        lines.append(f"method: auto is {method['rung']} ({method['reason']})")
        lines += [f"not {one['rung']}: {one['reason']}" for one in method["rejected"]]
    lines += [place["notice"]] if place["notice"] else []
    lines += [f"lacks {' and '.join(place['lacks'])}"] if place["lacks"] else []
    lines += [f"would fit with {', or '.join(place['would_fit'])}"] if place["would_fit"] else []
    lines.append(f"time: {place['time']['reason']}")
    output.data.print(f"\n[bold]{escape(_slots(place))}[/]")
    for line in lines:
        output.data.print(f"  {escape(line)}", soft_wrap=True)


def _kinds(items: list[dict[str, Any]]) -> str:
    return ", ".join(f"{item['kind']} {size(item['bytes'])}" for item in items) or "nothing"
