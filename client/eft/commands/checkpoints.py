"""`eft checkpoints …`: the states of a job's training that are kept."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.commands.again import named_copy, submit_again
from eft.commands.data import SetOption
from eft.errors import ExitCode
from eft.jobfile import apply_settings
from eft.manual.source import manual
from eft.session import JobArgument, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import age, size

app = App(no_args_is_help=True, help="Checkpoints of a job (docs/checkpoints.md).")

NAMED = "An id as listed, a number of steps, or `last`."
EXAMPLE = "step-00000050@2"


@app.command("list")
@manual(examples=[("eft checkpoints list last", "List the checkpoints of your newest job.")])
def list_checkpoints(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List a job's checkpoints, the furthest first."""
    with session(as_json, url) as (client, output):
        found = client.checkpoints.all(job_id)
        if as_json:
            output.json({"data": found})
            return
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "STEP", "MICRO-STEP", "SIZE", "AGE", "STATE"):
            table.add_column(column, no_wrap=True)
        for one in found:
            state = "set aside: damaged" if one["set_aside"] else ""
            numbers = (str(one["step"]), str(one["micro_step"]))
            table.add_row(escape(one["id"]), *numbers, size(one["bytes"]), age(one["written_at"]), state)
        output.table(table, "checkpoints")


@app.command("verify")
@manual(
    examples=[
        ("eft checkpoints verify last", "Verify all checkpoints of your newest job."),
        (f"eft checkpoints verify last {EXAMPLE}", "Verify one."),
    ],
    exits={ExitCode.FAILED: "a checkpoint is damaged"},
)
def verify(
    job_id: JobArgument,
    checkpoint: Annotated[str | None, typer.Argument(metavar="[CHECKPOINT]", help=NAMED)] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every file of a job's checkpoints with its size and SHA-256. Default: all of them."""
    with session(as_json, url) as (client, output):
        ids = [checkpoint] if checkpoint is not None else [one["id"] for one in client.checkpoints.all(job_id)]
        found = [client.checkpoints.verify(job_id, one) for one in ids]
        if as_json:
            output.json({"data": found})
        else:
            output.text("".join(f"{one['id']} {'whole' if one['whole'] else one['fault']}\n" for one in found))
        if not all(one["whole"] for one in found):
            raise typer.Exit(ExitCode.FAILED)


@app.command("resume-from")
@manual(
    examples=[
        ("eft checkpoints resume-from last", "Continue from the furthest checkpoint in a new job."),
        (
            "eft checkpoints resume-from last 50 --set optimizer.learning_rate=1e-5",
            "Continue from step 50 with another learning rate.",
        ),
    ]
)
def resume_from(
    job_id: JobArgument,
    checkpoint: Annotated[str, typer.Argument(metavar="[CHECKPOINT]", help=NAMED)] = "last",
    settings: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the job and print it; nothing is queued.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job's spec as a new job that begins with one of its checkpoints, with changed fields (data, learning
    rate, duration, evaluation), and print its id. The job must have ended."""
    with session(as_json, url) as (client, output):
        old = client.get(job_id)
        spec: dict[str, Any] = named_copy(old.spec)
        spec["checkpoint"] = {**spec["checkpoint"], "resume_from": {"job": old.id, "checkpoint": checkpoint}}
        spec = apply_settings(spec, settings or [])
        submit_again(client, output, spec, dry_run=dry_run, as_json=as_json)


@app.command("rm")
@manual(examples=[(f"eft checkpoints rm last {EXAMPLE}", "Delete one checkpoint of an ended job.")])
def rm(
    job_id: JobArgument,
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="Ids as listed.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete checkpoints of a job that has ended. One that another job may go on from is not deleted."""
    with session(as_json, url) as (client, output):
        for checkpoint in checkpoints:
            answer = client.checkpoints.delete(job_id, checkpoint)
            output.json(answer) if as_json else output.text(
                f"{answer['id']} deleted: {size(answer['freed_bytes'])} freed\n"
            )
