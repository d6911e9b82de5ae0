"""`eft watch|logs|metrics|compare|diff|trace`: what jobs do, have printed, have measured, and how they differ."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eft.commands.waiting import ENDS, PatienceOption, end, follow, going_on
from eft.conditions import figures
from eft.errors import ApiError, ExitCode, UsageFault
from eft.jobfile import read_job
from eft.manual.source import manual
from eft.session import HANDLE, JobArgument, JobArguments, JsonOption, UrlOption, job_id_of, session
from eft.terminal.comparison import ABSENT, Comparison, differences, words, written
from eft.terminal.output import Output, number, short_id, status_markup
from eft.terminal.progress import Away

if TYPE_CHECKING:
    from eft.client import Client

# --- watch


@manual(
    examples=[
        ("eft watch", "Watch running and waiting jobs, GPUs and events; q quits."),
        ("eft watch job-01kar3v8x5m2h6n9qst4wyz0bc", "Watch one job to its end; the exit code says how it ended."),
        ("eft watch job-01kar3v8x5m2h6n9qst4wyz0bc --json", "Stream its events, one JSON object per line."),
    ],
    exits=ENDS,
)
def watch(
    job_id: Annotated[str | None, typer.Argument(metavar="[JOB]", help=f"A job: {HANDLE}. Default: all jobs.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two requests to the server.", min=0.2)] = 1.0,
    patience: PatienceOption = 300.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch jobs: progress, loss, queue, GPUs and events; live on a terminal, plain lines in a pipe.

    The view survives restarts of the server. One job is watched to its end. Keys: up and down select a job, Enter opens
    it, Backspace goes back; p pauses, r resumes, c cancels (after a question); q quits (the jobs continue), Ctrl-Z
    suspends. With --json: the events of one job, or a snapshot of all jobs, as JSON lines.
    """
    with session(as_json, url) as (client, output):
        if job_id is not None:
            job_id = job_id_of(client, job_id)
        if job_id is not None and as_json:
            with going_on(output, job_id):
                job = client.wait(job_id, patience=patience, on_event=lambda event: output.json(event.raw))
            raise typer.Exit(job.exit_code)
        if job_id is not None and not output.live_stdout:
            end(client, output, follow(client, output, job_id, patience))
        _watch(client, output, job_id, interval, patience)


def _watch(client: Client, output: Output, job_id: str | None, interval: float, patience: float) -> None:
    from eft.watch import plain
    from eft.watch.frame import Frame
    from eft.watch.keys import Keys
    from eft.watch.look import Look
    from eft.watch.screen import Left, Screen, run

    if job_id is not None:
        client.get(job_id)  # a wrong id is told as everywhere
    changed = threading.Event()
    look = Look(client, job_id, interval=interval, patience=patience, on_change=changed.set)
    try:
        if output.as_json or not output.live_stdout:
            look.start()
            with going_on(output, job_id):
                _lines(look, changed, output) if output.as_json else plain.run(look, changed, output)
            return
        with going_on(output, job_id), Screen(output.data) as screen:
            look.on_change = screen.wake
            look.start()
            keys = Keys(look, lambda: look.world)
            ended = run(
                screen,
                lambda: Frame(look.world, client.config.url, keys=keys),
                lambda: look.world.error is not None or (look.world.over is not None and not keys.opened),
                keys.press,
            )
    except Left as left:
        raise typer.Exit(128 + left.number) from left
    finally:
        look.stop()
    if look.world.error is not None:
        raise look.world.error
    if ended and job_id is not None and look.world.over is not None:
        end(client, output, look.world.over)
    if job_id is not None:
        output.note(f"the job continues; come back with: eft watch {job_id}")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _lines(look: Any, changed: threading.Event, output: Output) -> None:
    while True:
        changed.wait()
        changed.clear()
        world = look.world
        if world.error is not None:
            raise world.error
        output.json(
            {
                "jobs": [one.job.raw for one in world.jobs],
                "queue": list(world.queue),
                "gpus": list(world.gpus),
                "away": world.away_why if world.away_since is not None else None,
            }
        )


# --- logs


@manual(
    examples=[
        ("eft logs job-01kar3v8x5m2h6n9qst4wyz0bc", "Print the log so far."),
        ("eft logs -f -n 20 job-01kar3v8x5m2h6n9qst4wyz0bc", "Show the last 20 lines and follow."),
    ]
)
def logs(
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt. Default: the newest.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, help="Only the last N lines.")] = None,
    patience: PatienceOption = 300.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a job's trainer. --follow continues with new output, across attempts; no line is lost or
    repeated when the server restarts. Without --follow at most the last MiB. With --json: one object per chunk."""
    with session(as_json, url) as (client, output):
        job_id = job_id_of(client, job_id)

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
        for chunk in client.follow_logs(job_id, attempt=attempt, tail=tail, patience=patience, on_gap=away.gap):
            away.back()
            if seen and chunk.attempt != seen:
                output.note(f"--- attempt {chunk.attempt}")
            seen = chunk.attempt
            put(chunk.text, chunk.attempt)


# --- metrics

NamesOption = Annotated[
    str | None, typer.Option("--names", metavar="NAMES", help="Only these, separated by commas: loss,grad_norm.")
]
CsvOption = Annotated[bool, typer.Option("--csv", help="CSV on stdout.")]


@manual(
    examples=[
        ("eft metrics job-01kar3v8x5m2h6n9qst4wyz0bc", "First, last, minimum and maximum of each metric."),
        ("eft metrics job-01kar3v8x5m2h6n9qst4wyz0bc --names loss --csv", "Loss of every step, for a plot."),
    ]
)
def metrics(
    job_id: JobArgument,
    names: NamesOption = None,
    points: Annotated[int | None, typer.Option(min=2, help="Maximum number of points per metric.")] = None,
    csv: CsvOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the metrics of a job."""
    with session(as_json, url) as (client, output):
        chosen = [name.strip() for name in names.split(",")] if names else None
        if csv and as_json:
            raise UsageFault("--csv or --json, not both")
        job_id = job_id_of(client, job_id)
        curves = client.metrics(job_id, names=chosen, points=points)
        _check_names(client, job_id, chosen, curves)
        if csv:
            output.text(client.metrics_csv(job_id, names=chosen, points=points))
            return
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
        output.table(table, "metrics")


def _check_names(client: Client, job_id: str, chosen: list[str] | None, curves: dict[str, Any]) -> None:
    """Raises UsageFault for a name that none of the job's curves has; a job without any has not begun."""
    missing = [name for name in chosen or [] if name not in curves]
    if missing and (there := sorted(client.metrics(job_id, points=2))):
        raise UsageFault(f"--names: the job has no curve `{missing[0]}`; it has {', '.join(there)}")


# --- compare and diff


@manual(
    examples=[
        (
            "eft compare job-01kar3v8x5m2h6n9qst4wyz0bc job-01kar3v8x5m2h6n9qst4wyz0bd",
            "Compare specs and results.",
        ),
        (
            "eft compare --names eval_loss,train_loss --csv job-01kar3v8x5m2h6n9qst4wyz0bc "
            "job-01kar3v8x5m2h6n9qst4wyz0bd",
            "Two metrics as CSV.",
        ),
    ]
)
def compare(
    job_ids: JobArguments,
    names: NamesOption = None,
    csv: CsvOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for a pull request or a CI summary.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare jobs: the fields in which their specs differ, the figures of their results, and the last value of every
    metric."""
    with session(as_json, url) as (client, output):
        if len(job_ids) < 2:
            raise UsageFault("give at least two jobs")
        if csv + markdown + as_json > 1:
            raise UsageFault("one of --csv, --markdown and --json")
        jobs = [client.get(job_id) for job_id in job_ids]
        if not as_json:
            jobs = [replace(job, spec=_with_filenames(client, job.spec)) for job in jobs]
        found = [figures(job.result, client.metrics(job.id, points=2)) for job in jobs]
        only = [name.strip() for name in names.split(",")] if names else []
        told = Comparison.of(jobs, found, only)
        if as_json:
            output.json(told.as_dict())
        elif csv:
            output.text(told.as_csv())
        elif markdown:
            output.text(told.as_markdown())
        else:
            _side_by_side(told, output)


def _with_filenames(client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with uploaded files as people named them, and the end of the id: two files may have one name."""

    def named(part: Any) -> Any:
        match part:
            case {"type": "file", "id": str(file_id)}:
                return part | {"id": _filename(client, file_id)}
            case dict():
                return {name: named(value) for name, value in part.items()}
            case list():
                return [named(value) for value in part]
            case _:
                return part

    return spec | {"data": named(spec.get("data") or {})}


def _filename(client: Client, file_id: str) -> str:
    try:
        return f"{client.file(file_id).filename} (…{file_id[-6:]})"
    except ApiError as error:
        if error.status == 404:  # deleted since
            return file_id
        raise


def _side_by_side(told: Comparison, output: Output) -> None:
    """Jobs as columns while the terminal has room for them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True, style="dim")
    for job in told.jobs:
        table.add_column(short_id(job.id, output.data), overflow="fold")
    two = len(told.jobs) == 2
    if two:
        table.add_column("DIFFERENCE", justify="right", no_wrap=True)
    before = "job"
    for kind, name, row in told.rows():
        if kind != before:
            table.add_section()
            before = kind
        cells = [status_markup(cell) for cell in row] if name == "status" else [Text(cell) for cell in row]
        table.add_row(Text(name), *cells, *([told.difference(name) if kind == "figure" else ""] if two else []))
    output.data.print(table)


@manual(
    examples=[
        (
            "eft diff job-01kar3v8x5m2h6n9qst4wyz0bc job-01kar3v8x5m2h6n9qst4wyz0bd",
            "Show where the specs of two jobs differ.",
        ),
        ("eft diff job-01kar3v8x5m2h6n9qst4wyz0bc job.yaml", "Show what this job file would change."),
    ]
)
def diff(
    one: Annotated[str, typer.Argument(metavar="JOB|FILE", help=f"A job ({HANDLE}), or a job file.")],
    other: Annotated[str, typer.Argument(metavar="JOB|FILE", help="The job or job file to compare with.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the fields in which two specs differ, including defaults. A job file is resolved by the server for the
    comparison with a job, without its data; two job files are compared as written."""
    with session(as_json, url) as (client, output):
        specs = _specs(client, [one, other], output)
        rows = differences(specs)
        if as_json:
            output.json({name: [None if value is ABSENT else value for value in row] for name, row in rows.items()})
            return
        for name, (left, right) in rows.items():
            if left is not ABSENT:
                output.data.print(Text(f"- {name}: {words(left)}", style="red"), soft_wrap=True)
            if right is not ABSENT:
                output.data.print(Text(f"+ {name}: {words(right)}", style="green"), soft_wrap=True)


def _specs(client: Client, names: list[str], output: Output) -> list[dict[str, Any]]:
    files = [name for name in names if Path(name).is_file()]
    jobs = {name: client.get(name).spec for name in names if name not in files}
    if not jobs:
        output.note("compared as written: defaults are not shown")
        return [written(read_job(name)[0]) for name in names]
    found = []
    for name in names:
        if name in jobs:
            found.append(jobs[name])
        else:
            (beside,) = jobs.values()
            wanted = read_job(name)[0]
            found.append(client.resolve(wanted | {"data": _stand_in(wanted.get("data"), beside["data"])}))
    if files:
        output.note("data is left out: a job file's own is not on the server")
        found = [{name: value for name, value in spec.items() if name != "data"} for spec in found]
    return found


def _stand_in(own: Any, beside: dict[str, Any]) -> dict[str, Any]:
    """For a job file's data, which is not on the server: with held-out rows if it has some, since defaults of other
    fields hang on that."""
    if isinstance(own, dict) and (own.get("eval") or own.get("split")):
        return {"train": beside["train"], "split": {"type": "hash", "eval_fraction": 0.5}}
    return {"train": beside["train"]}


@manual(
    examples=[
        ("eft trace job-01kar3v8x5m2h6n9qst4wyz0bc > trace.json", "Write the trace to a file for ui.perfetto.dev."),
    ]
)
def trace(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Print where a job's time went, from queue to export, as a trace that Perfetto and chrome://tracing open. It is
    JSON with and without --json."""
    with session(as_json, url) as (client, output):
        output.json(client.trace(job_id))
