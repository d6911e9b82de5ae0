"""`eft submit|ls|show|watch|logs|metrics|download|pause|resume|retry|priority|cancel`: the verbs of jobs."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from eft.errors import UsageFault
from eft.jobfile import apply_settings, read_job, upload_data, uploader
from eft.live import Away, Follower
from eft.output import Output, job_lines, jobs_table, number
from eft.session import JobArgument, JsonOption, UrlOption, session
from eft.types import FINAL, Artifact, File, Job

if TYPE_CHECKING:
    from eft.client import Client


JobArguments = Annotated[list[str], typer.Argument(metavar="JOB...", help="Jobs' ids.")]
PatienceOption = Annotated[
    float, typer.Option(help="Seconds that the server may be away while we wait.", min=0, show_default=True)
]


def submit(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Job file, YAML or JSON; - reads stdin.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field, e.g. training.max_steps=10.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Upload this file and train on it.")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Upload this file and hold it out.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end; the exit code tells it.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved spec, enqueue nothing. Data files do go up.")
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting twice with one key makes one job. Default: a new key a call.")
    ] = None,
    patience: PatienceOption = 300.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a job. Relative data paths in it are files beside the job file and are uploaded."""
    with session(as_json, url) as (client, output):
        job_spec, folder = read_job(source)
        job_spec = apply_settings(job_spec, settings or [])

        def told(path: Path, file: File) -> None:
            output.note(f"{path} is {file.id} ({file.rows} rows)")

        given = {role: path for role, path in (("train", data), ("eval", evaluation)) if path is not None}
        job_spec = upload_data(job_spec, folder, given, uploader(client, told))
        if dry_run:
            resolved = client.resolve(job_spec)
            output.json(resolved) if as_json else output.data.print_json(data=resolved)
            return
        job = client.submit(job_spec, idempotency_key=idempotency_key or uuid.uuid4().hex)
        if not wait:
            output.json(job.raw) if as_json else output.text(f"{job.id}\n")
            return
        output.note(f"job {job.id}")
        job = _follow(client, output, job.id, patience)
        _end(output, job)


def ls(
    status: Annotated[str | None, typer.Option(help="Only this status, or several with commas.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    created_after: Annotated[str | None, typer.Option(help="ISO 8601 time.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with session(as_json, url) as (client, output):
        jobs: list[Job] = []
        after: str | None = None
        while len(jobs) < limit:
            page = client.jobs(
                status=status.split(",") if status else None,
                name=name,
                created_after=created_after,
                limit=min(limit - len(jobs), 100),
                after=after,
            )
            jobs += page.jobs
            after = page.next
            if after is None or not page.jobs:
                break
        if as_json:
            output.json({"data": [job.raw for job in jobs], "next": after})
        else:
            output.data.print(jobs_table(jobs, output.data.width))
            if after is not None:
                output.note(f"there are more than {limit}: --limit")


def show(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """One job: its state, result or failure."""
    with session(as_json, url) as (client, output):
        job = client.get(job_id)
        output.json(job.raw) if as_json else _print_job(output, job)


def watch(
    job_id: JobArgument, patience: PatienceOption = 300.0, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Follow a job to its end; restarts of the server do not matter. With --json: its events as JSON lines."""
    with session(as_json, url) as (client, output):
        if as_json:
            job = client.wait(job_id, patience=patience, on_event=lambda event: output.json(event.raw))
            raise typer.Exit(job.exit_code)
        job = _follow(client, output, job_id, patience)
        _end(output, job)


def pause(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Free jobs' slots and keep what they have done: the trainer writes a checkpoint and leaves."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            _tell_status(output, client.pause(job_id))


def resume(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Queue paused jobs again. They go on from their checkpoints and end with the same weights."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            _tell_status(output, client.resume(job_id))


def priority(
    job_ids: JobArguments,
    to: Annotated[int, typer.Option("--to", min=-100, max=100, help="The new one; jobs of a higher one go first.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change jobs' places in the queue. What runs goes on; a project has a limit (`eft quota list`)."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            job = client.set_priority(job_id, to)
            output.json(job.raw) if as_json else output.text(f"{job.id} {job.status}, priority {to}\n")


def retry(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Try a failed or cancelled job again: a new job that goes on from its newest checkpoint. Prints its id."""
    with session(as_json, url) as (client, output):
        job = client.retry(job_id)
        output.json(job.raw) if as_json else output.text(f"{job.id}\n")


def cancel(
    job_ids: JobArguments,
    wait: Annotated[bool, typer.Option("--wait", help="Until they have ended.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop jobs. A running one gets a signal, time for a checkpoint, then is killed."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            job = client.cancel(job_id)
            if wait and not job.finished:
                job = client.wait(job_id)
            _tell_status(output, job)


def logs(
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="An earlier attempt. Default: the newest.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, help="Only the last so many lines.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the trainer printed. With --json: one object a chunk."""
    with session(as_json, url) as (client, output):

        def put(text: str, of: int) -> None:
            if as_json:
                output.json({"attempt": of, "text": text})
            elif text:
                output.text(text)

        if not follow:
            chunk = client.logs(job_id, attempt=attempt, tail=tail)
            put(chunk.text, chunk.attempt)
            return
        seen = attempt or 0
        away = Away(output)
        for chunk in client.follow_logs(job_id, attempt=attempt, tail=tail, on_gap=away.gap):
            away.back()
            if seen and chunk.attempt != seen:
                output.note(f"--- attempt {chunk.attempt}")
            seen = chunk.attempt
            put(chunk.text, chunk.attempt)


def metrics(
    job_id: JobArgument,
    names: Annotated[str | None, typer.Option(help="Only these curves, with commas: loss,grad_norm.")] = None,
    points: Annotated[int | None, typer.Option(min=2, help="Thin each curve to so many points.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """The curves of a job."""
    with session(as_json, url) as (client, output):
        chosen = [name.strip() for name in names.split(",")] if names else None
        if csv and as_json:
            raise UsageFault("--csv or --json, not both")
        if csv:
            output.text(client.metrics_csv(job_id, names=chosen, points=points))
            return
        curves = client.metrics(job_id, names=chosen, points=points)
        if as_json:
            output.json(curves)
            return
        table = Table(box=None, pad_edge=False)
        for column in ("METRIC", "POINTS", "FIRST", "LAST", "MIN", "MAX"):
            table.add_column(column, no_wrap=True, justify="left" if column == "METRIC" else "right")
        for name, curve in curves.items():
            values = [value for _, value in curve if value is not None]
            if values:
                shown = [number(value) for value in (values[0], values[-1], min(values), max(values))]
                table.add_row(name, str(len(curve)), *shown)
        output.data.print(table)


def download(
    job_id: JobArgument,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Artifacts or folders of them. Default: all.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder. Default: one named after the job.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the artifacts.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a job's artifacts here: checked, resumable, whole or not at all."""
    with session(as_json, url) as (client, output):
        chosen = _chosen(client.artifacts(job_id), paths or [])
        if listing:
            if as_json:
                output.json({"data": [artifact.raw for artifact in chosen]})
            for artifact in [] if as_json else chosen:
                output.text(f"{artifact.sha256[:12]}  {artifact.bytes:>12}  {artifact.path}\n")
            return
        folder = into if into is not None else Path(job_id)
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
            targets = client.download(job_id, chosen, into=folder, advance=lambda count: bar.advance(task, count))
        if as_json:
            files = [
                {"path": str(target), "bytes": artifact.bytes, "sha256": artifact.sha256}
                for artifact, target in zip(chosen, targets, strict=True)
            ]
            output.json({"job": job_id, "files": files})
        else:
            output.text("".join(f"{target}\n" for target in targets))


def _tell_status(output: Output, job: Job) -> None:
    output.json(job.raw) if output.as_json else output.text(f"{job.id} {job.status}\n")


def _chosen(artifacts: list[Artifact], paths: list[str]) -> list[Artifact]:
    if not paths:
        return artifacts
    chosen: dict[str, Artifact] = {}
    for path in paths:
        plain = path.rstrip("/")
        found = [a for a in artifacts if a.path == plain or a.path.startswith(f"{plain}/")]
        if not found:
            known = ", ".join(sorted({a.path.split("/")[0] for a in artifacts})) or "none yet"
            raise UsageFault(f"the job has no artifact {path}; there are: {known}")
        chosen |= {a.path: a for a in found}
    return list(chosen.values())


def _follow(client: Client, output: Output, job_id: str, patience: float) -> Job:
    try:
        with Follower(output) as follower:
            for snapshot in client.follow(job_id, patience=patience, on_gap=follower.gap):
                follower.feed(snapshot)
            return snapshot.job
    except KeyboardInterrupt:
        output.note(f"the job goes on; come back with: eft watch {job_id}")
        raise


def _end(output: Output, job: Job) -> None:
    """The last word on a job that was waited for."""
    output.json(job.raw) if output.as_json else _print_job(output, job)
    assert job.status in FINAL, job.status
    raise typer.Exit(job.exit_code)


def _print_job(output: Output, job: Job) -> None:
    for line in job_lines(job):
        output.data.print(line, soft_wrap=True)
