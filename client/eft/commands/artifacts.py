"""`eft download` and `eft open`: what a job hands back."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import HANDLE, JobArgument, JsonOption, UrlOption, job_id_of, session
from eft.terminal.output import Output
from eft.types import Artifact

SHOWN_FIRST = ("loss.png", "README.md", "run_record.json")
"""What `eft open JOB` opens: the first of these that is there."""


@manual(
    examples=[
        (
            "eft download job-01kar3v8x5m2h6n9qst4wyz0bc -o out",
            "Download everything; run again to resume.",
        ),
        ("eft download job-01kar3v8x5m2h6n9qst4wyz0bc adapter", "Download one folder."),
        ("eft download job-01kar3v8x5m2h6n9qst4wyz0bc --list", "List artifacts with checksums and sizes in bytes."),
    ]
)
def download(
    job_id: JobArgument,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[ARTIFACT]...", help="Artifacts or folders. Default: all.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--output", "-o", help="Target folder. Default: the id of the job.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the artifacts.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download a job's artifacts: verified, resumable, complete or absent."""
    with session(as_json, url) as (client, output):
        job_id = job_id_of(client, job_id)
        chosen = selected(client.artifacts(job_id), paths or [])
        if listing:
            print_listing(output, chosen)
        else:
            fetch(output, "job", job_id, chosen, partial(client.download, job_id, chosen), into)


def download_with_bar(output: Output, chosen: list[Artifact], download: Callable[..., list[Path]]) -> list[Path]:
    """Run `download` below a bar. Returns the paths of what came."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=output.notes,
        transient=True,
        disable=not output.live,
    ) as bar:
        task = bar.add_task("download", total=sum(artifact.bytes for artifact in chosen))
        return download(advance=lambda count: bar.advance(task, count))


def fetch(
    output: Output,
    kind: str,
    whose: str,
    chosen: list[Artifact],
    download: Callable[..., list[Path]],
    into: Path | None,
) -> None:
    """Download the files of a job or model (`kind`, with the id `whose`) below a bar, and print what came. `into`:
    target folder; default: the id."""
    folder = into if into is not None else Path(whose)
    targets = download_with_bar(output, chosen, partial(download, into=folder))
    if output.as_json:
        files = [
            {"path": str(target), "bytes": artifact.bytes, "sha256": artifact.sha256}
            for artifact, target in zip(chosen, targets, strict=True)
        ]
        output.json({kind: whose, "files": files})
    else:
        output.text("".join(f"{target}\n" for target in targets))


@manual(
    examples=[
        ("eft open job-01kar3v8x5m2h6n9qst4wyz0bc", "Open its loss curve in the desktop's viewer."),
        ("eft open job-01kar3v8x5m2h6n9qst4wyz0bc README.md", "Open its model card."),
        ("eft open", "Open the server's API reference."),
    ]
)
def open_it(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help=f"A job: {HANDLE}. Default: the server.")
    ] = None,
    path: Annotated[
        str | None, typer.Argument(metavar="[ARTIFACT]", help="One of its artifacts. Default: its loss curve.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the path or the URL.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Open an artifact of a job, or the server's pages, on the desktop. The artifact is first downloaded to a
    temporary folder, because its URL requires the key."""
    with session(as_json, url) as (client, output):
        if job_id is not None:
            job_id = job_id_of(client, job_id)
        if job_id is None:
            target = f"{client.config.url}/docs"
        else:
            artifacts = client.artifacts(job_id)
            names = [artifact.path for artifact in artifacts]
            first = next((name for name in SHOWN_FIRST if name in names), None)
            wanted = path or first
            if wanted is None:
                raise UsageFault(
                    f"the job has none of {', '.join(SHOWN_FIRST)}: name an artifact (eft download --list)"
                )
            chosen = [artifact for artifact in selected(artifacts, [wanted]) if artifact.path == wanted.rstrip("/")]
            if not chosen:
                raise UsageFault(f"{wanted} is a folder; name one file of it")
            folder = Path(tempfile.gettempdir()) / f"eft-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise UsageFault(f"{folder} is somebody else's")
            target = str(client.download(job_id, chosen, into=folder / job_id)[0])
        if as_json:
            output.json({"target": target})
        else:
            output.text(f"{target}\n")
        if not print_only and not as_json and sys.stdout.isatty() and _desktop():
            typer.launch(target)


def _desktop() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def print_listing(output: Output, chosen: list[Artifact]) -> None:
    if output.as_json:
        output.json({"data": [artifact.raw for artifact in chosen]})
        return
    for artifact in chosen:
        output.text(f"{artifact.sha256[:12]}  {artifact.bytes:>12}  {artifact.path}\n")


def selected(artifacts: list[Artifact], paths: list[str], of: str = "job") -> list[Artifact]:
    """The artifacts with these paths, and those in these folders. Raises UsageFault for a path that is neither."""
    if not paths:
        return artifacts
    chosen: dict[str, Artifact] = {}
    for path in paths:
        plain = path.rstrip("/")
        found = [a for a in artifacts if a.path == plain or a.path.startswith(f"{plain}/")]
        if not found:
            known = ", ".join(sorted({a.path.split("/")[0] for a in artifacts})) or "none yet"
            raise UsageFault(f"the {of} has no artifact {path}; there are: {known}")
        chosen |= {a.path: a for a in found}
    return list(chosen.values())
