"""`eft projects export`: everything that a project owns, on this side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from eft.archive import save
from eft.commands.admin.access import projects
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session

__all__ = ["projects"]


@projects.command("export")
@manual(
    examples=[
        (
            "eft projects export voice",
            "Write jobs, metrics, logs, models, files, members, audit and usage to voice.tar.",
        ),
        ("eft projects export voice --out /backup/voice.tar --checkpoints", "Include checkpoints."),
    ]
)
def export_project(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Name or id of the project of your key.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to. Default: PROJECT.tar.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Include the checkpoints of its jobs.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download everything that a project owns as a tar archive; for its admins. The file appears when it is complete
    and every file in it matches the SHA-256 of its manifest."""
    target = out if out is not None else Path(f"{Path(project).name}.tar")
    with session(as_json, url) as (client, output):
        with (
            Progress(
                TextColumn("{task.description}"),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=output.notes,
                transient=True,
                disable=not output.live,
            ) as bar,
            client.access.export(project, checkpoints=checkpoints) as blocks,
        ):
            task = bar.add_task(target.name, total=None)
            missing = save(_counted(blocks, partial(bar.advance, task)), target)
        if as_json:
            output.json({"path": str(target), "bytes": target.stat().st_size, "missing": missing})
            return
        for name in missing:
            output.note(f"the server no longer has {name}")
        output.text(f"{target}\n")


def _counted(blocks: Iterable[bytes], count: Callable[[float], None]) -> Iterator[bytes]:
    for block in blocks:
        count(len(block))
        yield block
