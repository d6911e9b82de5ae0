"""`eft files upload|ls|rm|get|preview`: training data on the server."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from eft.commands.data import SetOption
from eft.commands.waiting import no_result
from eft.errors import ExitCode, UsageFault
from eft.jobfile import apply_settings, read_job
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.datasheet import print_notices, print_preview
from eft.terminal.output import files_table

app = App(no_args_is_help=True, help="Training data on the server.")

FileArgument = Annotated[str, typer.Argument(metavar="FILE_ID", help=f"A file: {HANDLE}.")]


@app.command()
@manual(examples=[("eft files upload train.jsonl eval.jsonl", "Upload two files and print their ids.")])
def upload(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="JSONL, JSON, CSV or Parquet files.")],
    row_format: Annotated[str | None, typer.Option("--format", help="Row format, if rows match two formats.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="e.g. prompt=question")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload files; the server checks every row. Prints their ids."""
    named = {}
    for column in columns or ():
        ours, equals, theirs = column.partition("=")
        if not (ours and equals and theirs):
            raise UsageFault(f"--column takes OURS=THEIRS such as prompt=question, not `{column}`")
        named[ours] = theirs
    with session(as_json, url) as (client, output):
        for path in paths:
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=output.notes,
                transient=True,
                disable=not output.live,
            ) as bar:
                task = bar.add_task(path.name, total=path.stat().st_size if path.is_file() else None)
                file = client.upload(path, format=row_format, columns=named, advance=partial(bar.advance, task))
            output.json(file.raw) if as_json else output.text(f"{file.id}\n")
            print_notices(file.raw.get("report") or {}, output.notes)


@app.command()
@manual(examples=[("eft files ls", "List the project's files.")])
def ls(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List files, newest first."""
    with session(as_json, url) as (client, output):
        files = list(client.files())
        if as_json:
            output.json({"data": [file.raw for file in files]})
        else:
            output.table(files_table(files, output.data), "files")


@app.command()
@manual(examples=[("eft files rm file-01kar3v8x5m2h6n9qst4wyz0bc", "Delete a file that no job needs.")])
def rm(
    file_ids: Annotated[list[str], typer.Argument(metavar="FILE_ID...", help=f"Files: {HANDLE}.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete files."""
    with session(as_json, url) as (client, output):
        for file_id in file_ids:
            client.delete_file(file_id)
            output.json({"id": file_id, "deleted": True}) if as_json else output.text(f"{file_id}\n")


@app.command()
@manual(
    examples=[
        (
            "eft files preview file-01kar3v8x5m2h6n9qst4wyz0bc --model HuggingFaceTB/SmolLM2-135M-Instruct",
            "Show how training would render it.",
        )
    ],
    exits={ExitCode.USAGE: "the file has a fault, or the usage is wrong"},
)
def preview(
    file_id: FileArgument,
    model: Annotated[str | None, typer.Option(help="Base model, as in a job.")] = None,
    settings: SetOption = None,
    spec: Annotated[str | None, typer.Option(help="Job file with model and options.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Preview what training would do with a file: tokens, truncated and duplicate rows, padding, and sample rows with
    their trained tokens. A worker computes it without a GPU."""
    with session(as_json, url) as (client, output):
        job = read_job(spec)[0] if spec is not None else {}
        data = job.get("data")
        if data is not None:  # its file is the one that is named here
            job = job | {"data": {k: v for k, v in data.items() if k == "rendering"} if isinstance(data, dict) else {}}
        job = apply_settings(job | ({"model": model} if model is not None else {}), settings or [])
        if "model" not in job:
            raise UsageFault("say with --model which model's tokenizer is to read it, or with --spec whose job")
        with output.notes.status("waiting for a worker") if output.live else nullcontext():
            found = client.preview(file_id, job)
        if as_json:
            output.json(found)
        elif found["result"] is not None:
            print_preview(found["result"], output.data)
        else:
            raise no_result(found)
        if found["status"] != "succeeded" or not found["result"]["ok"]:
            raise typer.Exit(ExitCode.USAGE)


@app.command()
@manual(examples=[("eft files get file-01kar3v8x5m2h6n9qst4wyz0bc > rows.jsonl", "Print its content.")])
def get(file_id: FileArgument, url: UrlOption = None) -> None:
    """Write a file's content to stdout."""
    with session(False, url) as (client, _), client.file_content(file_id) as chunks:
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
