"""`eft submit|ls|show|check|pause|resume|retry|priority|cancel|delete`: the verbs of jobs."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eft.commands.models.pipelines import refuse_job_options, submit_pipeline
from eft.commands.models.sweeps import submit_sweep
from eft.commands.plan import tell_notices
from eft.commands.waiting import (
    ENDS,
    Deadline,
    FailIfOption,
    PatienceOption,
    TimeoutOption,
    conditions,
    end,
    follow,
    tell,
)
from eft.errors import ExitCode, UsageFault
from eft.jobfile import StandIns, apply_settings, checked_first, read_job, upload_data, uploader
from eft.manual.source import manual
from eft.session import HANDLE, JobArgument, JobArguments, JsonOption, UrlOption, job_id_of, session
from eft.terminal.datasheet import print_notices
from eft.terminal.output import Output, jobs_table, size
from eft.types import UNFINISHED, File, Job

if TYPE_CHECKING:
    from eft.client import Client


@manual(
    examples=[
        ("eft submit job.yaml", "Submit it and print its id."),
        (
            "eft submit job.yaml --data rows.jsonl --set training.max_steps=10 --wait",
            "With other data and a changed field, to its end.",
        ),
        (
            "eft submit job.yaml --fail-if 'eval_loss > 1.2' --idempotency-key \"$CI_PIPELINE_ID\"",
            "In a pipeline: create one job even if repeated, and fail if the result is not good enough.",
        ),
        ("eft submit job.yaml --after last", "Start it when your newest job has succeeded."),
        ("eft submit job.yaml --dry-run", "Show all defaults without queueing."),
        ("eft submit pipeline.yaml --wait", "Submit jobs one after another, to the end of the last."),
    ],
    exits=(*ENDS, ExitCode.CONDITION, ExitCode.TIMEOUT),
)
def submit(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Job file, YAML or JSON; - reads stdin.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field, e.g. training.max_steps=10.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Upload this file and train on it.")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Upload this file and hold it out.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Add a tag, to find the job by.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="JOB", help="Start after this job has succeeded; may be repeated."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="A note for people.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job to its end; the exit code says how it ended.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the job and print it with all defaults; nothing is uploaded or queued."),
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting twice with one key creates one job. Default: a new key per call.")
    ] = None,
    fail_if: FailIfOption = None,
    patience: PatienceOption = 300.0,
    timeout: TimeoutOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job, a pipeline (a file with `steps`) or a sweep (a file with `sweep`), and print its id. Relative data
    paths are relative to the file; the data files are uploaded unless the project already has them. With --wait
    (implied by --fail-if) follow the job to its end."""
    with session(as_json, url) as (client, output):
        asked, deadline = conditions(fail_if), Deadline(timeout)
        job_spec, folder = read_job(source)
        if "steps" in job_spec:
            refuse_job_options(
                "pipeline",
                set=settings,
                data=data,
                eval=evaluation,
                tag=tags,
                note=note,
                after=after,
                **{"fail-if": fail_if, "timeout": timeout},
            )
            submit_pipeline(
                client,
                output,
                job_spec,
                folder,
                upload=uploader(client, lambda path, file: output.note(f"{path} is {file.id} ({file.rows} rows)")),
                wait=wait,
                dry_run=dry_run,
                key=idempotency_key,
                patience=patience,
            )
            return
        job_spec = _labelled(apply_settings(job_spec, settings or []), tags, after, note)

        def told(path: Path, file: File) -> None:
            output.note(f"{path} is {file.id} ({file.rows} rows)")
            # The job's own notice says which form its pairs take.
            print_notices(file.raw.get("report") or {}, output.notes, leave_out=("pairs",))

        given = {role: path for role, path in (("train", data), ("eval", evaluation)) if path is not None}
        if "sweep" in job_spec:
            refuse_job_options("sweep", **{"fail-if": fail_if, "timeout": timeout})
            submit_sweep(
                client,
                output,
                job_spec,
                folder,
                given,
                upload=uploader(client, told),
                wait=wait,
                dry_run=dry_run,
                key=idempotency_key,
                patience=patience,
            )
            return
        if dry_run:
            _show_dry_run(client, output, job_spec, folder, given)
            return
        job_spec = checked_first(client, job_spec, folder, given, uploader(client, told))
        job = client.submit(job_spec, idempotency_key=idempotency_key or uuid.uuid4().hex)
        tell_notices(output, job.raw)
        if not (wait or asked):
            _show_submitted(client, output, job)
            return
        output.note(f"job {job.id}")
        job = follow(client, output, job.id, patience, deadline)
        end(client, output, job, asked, patience)


def _labelled(
    job_spec: dict[str, Any], tags: list[str] | None, after: list[str] | None, note: str | None
) -> dict[str, Any]:
    """The spec with what options of the command line add to it."""
    if tags:
        job_spec = job_spec | {"tags": [*(job_spec.get("tags") or ()), *tags]}
    if after:
        job_spec = job_spec | {"after": [*(job_spec.get("after") or ()), *after]}
    return job_spec if note is None else job_spec | {"note": note}


def _show_dry_run(
    client: Client, output: Output, job_spec: dict[str, Any], folder: Path, given: dict[str, Path]
) -> None:
    """Print the job with all defaults, and say where it does not fit; nothing is uploaded or queued."""
    stand_ins = StandIns(client)
    answer = client.plan(upload_data(job_spec, folder, given, stand_ins))
    stand_ins.tell(output.note)
    if (planned := answer.get("plan")) is not None and not planned["fits"]:
        output.note(f"fits nowhere: {planned['reason']}")
    tell_notices(output, answer)
    resolved = answer["spec"]
    output.json(resolved) if output.as_json else output.data.print_json(data=resolved)


def _show_submitted(client: Client, output: Output, job: Job) -> None:
    """Print the job's id, and why it waits where nobody can take it as things stand."""
    output.json(job.raw) if output.as_json else output.text(f"{job.id}\n")
    place = client.get(job.id).queue or {}
    if place.get("code") in ("requirements", "no_worker"):
        output.note(f"it waits: {place['reason']}")


@manual(
    examples=[
        ("eft ls --status running,queued", "List recent jobs."),
        ("eft ls --tag baseline", "Jobs with this tag."),
        ("eft ls --json | jq -r '.data[].id'", "Ids for a script."),
    ]
)
def ls(
    status: Annotated[str | None, typer.Option(help="Only this status, or several separated by commas.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    created_after: Annotated[str | None, typer.Option(help="ISO 8601 time.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Only with this tag; repeated: with all of them.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Archived ones too.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number, newest first.")] = 20,
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
                tags=tags,
                archived=archived,
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
            output.table(jobs_table(jobs, output.data), "jobs")
            if after is not None:
                output.note(f"there are more than {limit}: --limit")


@manual(examples=[("eft show job-01kar3v8x5m2h6n9qst4wyz0bc", "Show status, queue position, result or failure.")])
def show(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show a job: status, result or failure."""
    with session(as_json, url) as (client, output):
        job = client.get(job_id)
        tell(output, job)


@manual(
    examples=[
        ("eft status", "List the jobs that have not ended."),
        ("eft status last", "Show your newest job."),
    ]
)
def status(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help=f"A job: {HANDLE}. Default: all that have not ended.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job, or list the jobs that have not ended."""
    if job_id is not None:
        show(job_id, url=url, as_json=as_json)
    else:
        ls(status=",".join(UNFINISHED), archived=True, limit=1000, url=url, as_json=as_json)


@manual(
    examples=[
        (
            "eft check job-01kar3v8x5m2h6n9qst4wyz0bc --fail-if 'eval_loss > 1.2'",
            "Fail if the result is not good enough.",
        ),
        (
            "eft check job-01kar3v8x5m2h6n9qst4wyz0bc --wait --fail-if 'train_loss >= 2'",
            "Wait for a running job, as a second step of a pipeline.",
        ),
    ],
    exits=(*ENDS, ExitCode.CONDITION, ExitCode.TIMEOUT),
)
def check(
    job_id: JobArgument,
    fail_if: FailIfOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end first.")] = False,
    patience: PatienceOption = 300.0,
    timeout: TimeoutOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report how a job ended, with an exit code for pipelines. Without --wait, a job that has not ended is a usage
    error; so is a metric that the job does not have."""
    with session(as_json, url) as (client, output):
        asked, deadline = conditions(fail_if), Deadline(timeout)
        job = follow(client, output, job_id_of(client, job_id), patience, deadline) if wait else client.get(job_id)
        if not job.finished:
            raise UsageFault(f"the job is {job.status}; --wait waits for its end")
        end(client, output, job, asked, patience)


@manual(examples=[("eft pause job-01kar3v8x5m2h6n9qst4wyz0bc", "Pause it without losing progress.")])
def pause(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Pause jobs: the trainer writes a checkpoint and releases the slot."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            _tell_status(output, client.pause(job_id))


@manual(examples=[("eft resume job-01kar3v8x5m2h6n9qst4wyz0bc", "Resume it.")])
def resume(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Queue paused jobs again. They continue from their checkpoints and end with the same weights."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            _tell_status(output, client.resume(job_id))


@manual(
    examples=[("eft priority job-01kar3v8x5m2h6n9qst4wyz0bc --to 10", "Move it ahead of the project's other jobs.")]
)
def priority(
    job_ids: JobArguments,
    to: Annotated[
        int, typer.Option("--to", min=-100, max=100, help="The new priority; jobs of a higher priority go first.")
    ],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the priority of jobs. Running jobs continue; each project has a limit (`eft quota list`)."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            job = client.set_priority(job_id, to)
            output.json(job.raw) if as_json else output.text(f"{job.id} {job.status}, priority {to}\n")


@manual(examples=[("eft cancel job-01kar3v8x5m2h6n9qst4wyz0bc --wait", "Cancel it and wait for its end.")])
def cancel(
    job_ids: JobArguments,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they have ended.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel jobs. A running job gets a signal and time for a checkpoint before it is killed."""
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            job = client.cancel(job_id)
            if wait and not job.finished:
                job = client.wait(job.id)
            _tell_status(output, job)


@manual(
    examples=[
        ("eft delete job-01kar3v8x5m2h6n9qst4wyz0bc", "Say what goes with it, ask, and delete it."),
        ("eft delete last --dry-run", "Only say what it would free, and what needs it."),
        (
            "eft ls --status failed --json | jq -r '.data[].id' | xargs eft delete --yes",
            "Delete failed jobs without a question.",
        ),
    ]
)
def delete(
    job_ids: JobArguments,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete ended jobs with their checkpoints, adapters, models, logs, metrics and specs, after saying what that frees
    and asking. Only a backup can restore them. Uploaded files and the record of GPU time stay. Nothing is deleted while
    something needs one of the jobs. Retries are deleted before the jobs that they retry, in whatever order they are
    named."""
    with session(as_json, url) as (client, output):
        # Ids grow with time, and a retry is younger.
        ids = sorted({job_id_of(client, job_id) for job_id in job_ids}, reverse=True)
        previews = [client.delete(job_id, dry_run=True) for job_id in ids]
        for one in previews:
            if dry_run:
                output.json(one) if as_json else output.text(f"{_would_go(one)}\n")
            elif not (as_json or yes):
                output.note(_would_go(one))
        needed = [
            f"{one['id']}: {obstacle['message']}"
            for one in previews
            for obstacle in one["obstacles"]
            if obstacle["code"] == "not_ended" or obstacle["by"] not in ids
        ]
        if needed:
            raise UsageFault("\n  ".join(["nothing can be deleted" if dry_run else "nothing was deleted", *needed]))
        if dry_run:
            return
        if not yes:
            if not sys.stdin.isatty():
                raise UsageFault("nothing was deleted: there is no terminal to ask on; --yes deletes without asking")
            if not typer.confirm(f"Delete {'it' if len(ids) == 1 else f'these {len(ids)} jobs'} for good?", err=True):
                output.note("nothing was deleted")
                raise typer.Exit(ExitCode.INTERRUPTED)
        for job_id in ids:
            answer = client.delete(job_id)
            output.json(answer) if as_json else output.text(f"{job_id} deleted: {_freed(answer['freed_bytes'])}\n")


def _would_go(preview: dict[str, Any]) -> str:
    """A job, and what its deletion frees."""
    name = f" ({preview['name']})" if preview["name"] else ""
    words = f"{preview['id']}{name}: {_freed(preview['freed_bytes'], 'would be freed')}"
    if preview["model"] is None:
        return words
    formats = f" with {', '.join(preview['exports'])}" if preview["exports"] else ""
    return f"{words}; its model {preview['model']}{formats} goes too"


def _freed(count: dict[str, int], verb: str = "freed") -> str:
    parts = [f"{name} {size(number)}" for name, number in count.items() if number and name != "other"]
    total = sum(count.values())
    if not total:
        return "it has left nothing on the disk"
    return f"{size(total)} {verb}" + (f" ({', '.join(parts)})" if parts else "")


def _tell_status(output: Output, job: Job) -> None:
    output.json(job.raw) if output.as_json else output.text(f"{job.id} {job.status}\n")
