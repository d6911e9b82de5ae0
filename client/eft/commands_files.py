"""`eft files upload|ls|rm|get`: training data on the server."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from eft.output import files_table
from eft.session import JsonOption, UrlOption, session

app = typer.Typer(no_args_is_help=True, help="Training data on the server.")

FileArgument = Annotated[str, typer.Argument(metavar="FILE_ID", help="A file's id.")]


@app.command()
def upload(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="JSON Lines files.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send files; the server checks every line. Prints their ids."""
    with session(as_json, url) as (client, output):
        for path in paths:
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=output.notes,
                transient=True,
                disable=not output.notes.is_terminal,
            ) as bar:
                task = bar.add_task(path.name, total=path.stat().st_size if path.is_file() else None)
                file = client.upload(path, advance=partial(bar.advance, task))
            output.json(file.raw) if as_json else output.text(f"{file.id}\n")


@app.command()
def ls(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List files, newest first."""
    with session(as_json, url) as (client, output):
        files = list(client.files())
        if as_json:
            output.json({"data": [file.raw for file in files]})
        else:
            output.data.print(files_table(files, output.data.width))


@app.command()
def rm(
    file_ids: Annotated[list[str], typer.Argument(metavar="FILE_ID...", help="Files' ids.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete files."""
    with session(as_json, url) as (client, output):
        for file_id in file_ids:
            client.delete_file(file_id)
            output.json({"id": file_id, "deleted": True}) if as_json else output.text(f"{file_id}\n")


@app.command()
def get(file_id: FileArgument, url: UrlOption = None) -> None:
    """Write a file's content to stdout."""
    with session(False, url) as (client, _), client.file_content(file_id) as chunks:
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
