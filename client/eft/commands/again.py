"""`eft clone` and `eft retry`: a job once more, changed or continued."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eft.commands.data import SetOption
from eft.commands.plan import tell_notices
from eft.errors import ExitCode, UsageFault
from eft.jobfile import apply_settings
from eft.manual.source import manual
from eft.session import JobArgument, JsonOption, UrlOption, session
from eft.terminal.output import Output

if TYPE_CHECKING:
    from eft.client import Client

LIMIT = "resources.max_runtime_seconds"
LONGEST_NAME = 100
"""Characters of a job's name (docs/spec.md)."""
COPY = " copy"


@manual(
    examples=[
        ("eft clone last --set optimizer.learning_rate=1e-4", "Run your newest job again with another learning rate."),
        ("eft clone intents --set name=intents-2 --dry-run", "Show the spec that would be submitted."),
    ]
)
def clone(
    job_id: JobArgument,
    settings: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the job and print it; nothing is queued.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job's spec again as a new job from step 0, with changed fields, and print its id. Fields that are not
    set keep the values of that job, its defaults included; its data files are not uploaded again."""
    with session(as_json, url) as (client, output):
        old = client.get(job_id)
        spec = apply_settings(named_copy(old.spec), settings or [])
        submit_again(client, output, spec, dry_run=dry_run, as_json=as_json)


def submit_again(client: Client, output: Output, spec: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Submit a copy of a job and print its id; with `dry_run`, check it and print it."""
    if dry_run:
        answer = client.plan(spec)
        tell_notices(output, answer)
        output.json(answer["spec"]) if as_json else output.data.print_json(data=answer["spec"])
        return
    job = client.submit(spec, idempotency_key=uuid.uuid4().hex)
    tell_notices(output, job.raw)
    output.json(job.raw) if as_json else output.text(f"{job.id}\n")


def named_copy(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with a name of its own: two jobs of one name would have no handle but their ids."""
    name = spec.get("name")
    return spec | {"name": f"{name[: LONGEST_NAME - len(COPY)]}{COPY}"} if name else spec


@manual(
    examples=[
        ("eft retry job-01kar3v8x5m2h6n9qst4wyz0bc", "Retry from the newest checkpoint."),
        (f"eft retry last --set {LIMIT}=7200", "Retry with another time limit."),
    ],
    exits={ExitCode.USAGE: "the job has not failed and was not cancelled, or the usage is wrong"},
)
def retry(
    job_id: JobArgument,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=f"A new value of {LIMIT}.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retry a failed or cancelled job: create a new job that continues from its newest checkpoint, and print its id.
    Only the time limit can change; `eft clone` changes the rest and starts from step 0."""
    with session(as_json, url) as (client, output):
        job = client.retry(job_id, max_runtime_seconds=_limit(settings or []))
        output.json(job.raw) if as_json else output.text(f"{job.id}\n")


def _limit(settings: list[str]) -> int | None:
    """Raises UsageFault for a field that a retry cannot change."""
    limit = None
    for setting in settings:
        field, _, text = setting.partition("=")
        if field.strip() != LIMIT:
            raise UsageFault(
                f"--set {field.strip()}: a retry continues the job's steps, so only {LIMIT} can change; "
                "`eft clone` starts again with other fields"
            )
        if not text.strip().isdecimal():
            raise UsageFault(f"--set {LIMIT}: {text!r} is not a whole number of seconds")
        limit = int(text)
    return limit
