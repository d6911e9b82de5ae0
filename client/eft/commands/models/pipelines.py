"""`eft pipelines …` and `eft lineage`: jobs one after another, and what a model is made of."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.commands.models.several import print_head, print_id, print_status, show_end
from eft.commands.waiting import ENDS, PatienceOption
from eft.errors import UsageFault
from eft.jobfile import StandIns, Uploader, upload_data
from eft.manual.source import manual
from eft.session import HANDLE, JobArgument, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, age, short_id, status_markup
from eft.types import Pipeline

if TYPE_CHECKING:
    from eft.client import Client

app = App(no_args_is_help=True, help="Jobs one after another (docs/pipelines.md).")

PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE", help=f"A pipeline: {HANDLE}.")]


def submit_pipeline(
    client: Client,
    output: Output,
    document: dict[str, Any],
    folder: Path,
    *,
    upload: Uploader,
    wait: bool,
    dry_run: bool,
    key: str | None,
    patience: float,
) -> None:
    """`eft submit` of a file with `steps`. What is wrong with it is told before any file goes up."""
    stand_ins = StandIns(client)
    resolved = client.pipelines.resolve(_with_data(document, folder, stand_ins))
    if dry_run:
        stand_ins.tell(output.note)
        output.json(resolved) if output.as_json else output.data.print_json(data=resolved["steps"])
        return
    made = client.pipelines.submit(_with_data(document, folder, upload), idempotency_key=key or uuid.uuid4().hex)
    if not wait:
        print_id(output, made)
        return
    output.note(f"pipeline {made.id}")
    _follow(client, output, made.id, patience)


def _with_data(document: dict[str, Any], folder: Path, upload: Uploader) -> dict[str, Any]:
    """The document with file ids in the place of local files; the server says what else is wrong with it."""
    steps = document.get("steps")
    if not isinstance(steps, list):
        return document
    placed = [
        {**step, "job": upload_data(step["job"], folder, {}, upload)}
        if isinstance(step, dict) and isinstance(step.get("job"), dict)
        else step
        for step in steps
    ]
    return {**document, "steps": placed}


def _follow(client: Client, output: Output, pipeline_id: str, patience: float) -> None:
    show_end(output, lambda: client.pipelines.wait(pipeline_id, patience=patience), _show)


def _show(output: Output, found: Pipeline) -> None:
    if output.as_json:
        output.json(found.raw)
        return
    print_head(output, found)
    table = Table(box=None, pad_edge=False)
    for column in ("STEP", "STATUS", "JOB", "GATES"):
        table.add_column(column, no_wrap=column != "GATES")
    for step in found.steps:
        gates = "; ".join(map(_gate, step.gates))
        job = short_id(step.job or "", output.data)
        table.add_row(escape(step.name), status_markup(step.status), job, escape(gates))
    output.data.print(table)


def _gate(gate: dict[str, Any]) -> str:
    bounds = [f">= {gate['min']:g}"] if gate["min"] is not None else []
    bounds += [f"<= {gate['max']:g}"] if gate["max"] is not None else []
    verdict = {None: "", True: ", passed", False: ", not passed"}[gate["passed"]]
    value = f" (is {gate['value']:g}{verdict})" if gate["value"] is not None else verdict
    return f"{gate['metric']} {' and '.join(bounds)}{value}"


@app.command("ls")
@manual(examples=[("eft pipelines ls --status running", "List running pipelines.")])
def list_pipelines(
    status: Annotated[str | None, typer.Option(help="running, succeeded, failed or cancelled.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the project's pipelines, newest first."""
    with session(as_json, url) as (client, output):
        found = client.pipelines.all(status=status, limit=limit)
        if as_json:
            output.json({"data": [one.raw for one in found]})
            return
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "STATUS", "STEPS", "AGE", "NAME"):
            table.add_column(column, no_wrap=True)
        for one in found:
            done = sum(step.status == "succeeded" for step in one.steps)
            steps = f"{done}/{len(one.steps)}"
            table.add_row(
                short_id(one.id, output.data),
                status_markup(one.status),
                steps,
                age(one.created_at),
                escape(one.name or ""),
            )
        output.table(table, "pipelines")


@app.command("show")
@manual(examples=[("eft pipelines show pipe-01kar3v8x5m2h6n9qst4wyz0bc", "Show its steps, their jobs and gates.")])
def show_pipeline(pipeline: PipelineArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show a pipeline: its steps with their jobs and gates."""
    with session(as_json, url) as (client, output):
        _show(output, client.pipelines.get(pipeline))


@app.command("wait")
@manual(
    examples=[("eft pipelines wait pipe-01kar3v8x5m2h6n9qst4wyz0bc", "Wait for its end; the exit code says how.")],
    exits=ENDS,
)
def wait_for_pipeline(
    pipeline: PipelineArgument, patience: PatienceOption = 300.0, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Wait until a pipeline has ended, and exit as it did."""
    with session(as_json, url) as (client, output):
        _follow(client, output, client.pipelines.get(pipeline).id, patience)


@app.command("cancel")
@manual(examples=[("eft pipelines cancel pipe-01kar3v8x5m2h6n9qst4wyz0bc", "Cancel it with the job under way.")])
def cancel_pipeline(pipeline: PipelineArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Cancel a pipeline: the job under way is cancelled, and no further one is submitted."""
    with session(as_json, url) as (client, output):
        print_status(output, client.pipelines.cancel(pipeline))


@app.command("retry")
@manual(
    examples=[
        ("eft pipelines retry pipe-01kar3v8x5m2h6n9qst4wyz0bc", "Continue where it ended."),
        ("eft pipelines retry pipe-01kar3v8x5m2h6n9qst4wyz0bc --from intents", "Begin a step anew."),
    ]
)
def retry_pipeline(
    pipeline: PipelineArgument,
    start: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="Begin this step anew; the gates before it are passed.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retry a failed or cancelled pipeline: create a new one that takes over the jobs that have succeeded, and print
    its id."""
    with session(as_json, url) as (client, output):
        found = client.pipelines.retry(pipeline, start=start)
        output.json(found.raw) if as_json else output.text(f"{found.id}\n")


@app.command("delete")
@manual(examples=[("eft pipelines delete pipe-01kar3v8x5m2h6n9qst4wyz0bc", "Delete it; its jobs stay.")])
def delete_pipeline(pipeline: PipelineArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Delete an ended pipeline with its events. Its jobs stay."""
    with session(as_json, url) as (client, output):
        answer = client.pipelines.delete(pipeline)
        output.json(answer) if as_json else output.text(f"{pipeline} deleted\n")


@manual(examples=[("eft lineage job-01kar3v8x5m2h6n9qst4wyz0bc", "Show the jobs behind a model, with hashes.")])
def lineage(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show what a job's model is made of: the job and those before it, with the hashes of their data, spec, chat
    template, code and weights."""
    with session(as_json, url) as (client, output):
        found = client.lineage(job_id)
        if as_json:
            output.json({"data": found})
            return
        print_lineage(output, found)


def print_lineage(output: Output, found: list[dict[str, Any]]) -> None:
    for one in found:
        output.data.print(f"{one['job']}  {one['stage']}, {one['method']}", soft_wrap=True, highlight=False)
        told = [("data", ", ".join(one["data"]["train"])), ("spec", one["spec_sha256"])]
        told += [("template", one["template_sha256"]), ("code", one["code"]["sha256"])]
        told += [(name, digest) for name, digest in one["weights"].items() if name.endswith(".safetensors")]
        told += [(f"answers scored by {scorer['job']}", digest) for scorer, digest in _scorers(one)]
        for name, digest in told:
            if digest:
                output.data.print(f"    {escape(name)}: {digest}", soft_wrap=True, highlight=False)


def _scorers(generation: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The reward models of a job, each with the hash of its weights."""
    return [
        (scorer, digest)
        for scorer in generation.get("reward_models", ())
        for name, digest in scorer["weights"].items()
        if name.endswith(".safetensors")
    ]


def refuse_job_options(several: str, /, **given: Any) -> None:
    """Options of `eft submit` that are about one job."""
    if named := [f"--{name}" for name, value in given.items() if value]:
        raise UsageFault(f"{', '.join(named)}: a {several} has several jobs; write it into the file")
