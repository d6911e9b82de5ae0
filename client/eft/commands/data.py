"""`eft data check|preview FILE`: look at data by hand; the application beside the client does it, without a server.
And `eft samples JOB` and `eft rollouts JOB`, what became of it."""

from __future__ import annotations

import json
import subprocess
from typing import Annotated, Any

import typer

from eft.commands.admin.box import application_home, command
from eft.errors import EftClientError, ExitCode, LocalError, UsageFault
from eft.manual.source import manual
from eft.session import JobArgument, JsonOption, UrlOption, outputs, session
from eft.terminal.app import App
from eft.terminal.datasheet import print_check, print_preview, print_rollouts, print_samples
from eft.terminal.output import Output

app = App(no_args_is_help=True, help="Check training data on this machine, without a server.")

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="An option as in a job, e.g. training.max_length=512."),
]


@app.command()
@manual(
    examples=[
        ("eft data check rows.jsonl", "List every fault before the upload."),
        (
            "eft data check rows.csv --column prompt=question --column completion=answer",
            "Map columns with other names.",
        ),
    ],
    exits={ExitCode.USAGE: "a file has a fault, or the usage is wrong"},
)
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="JSONL, JSON, CSV or Parquet.")],
    format: Annotated[str, typer.Option(help="Row format; needed only if rows match two.")] = "auto",
    column: Annotated[
        list[str] | None, typer.Option(metavar="OURS=THEIRS", help="Field name for a column, e.g. prompt=question.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a file: format, number of rows, and every fault. Exit code 2 if there is a fault."""
    arguments = ["check", *files, "--format", format]
    for pair in column or ():
        arguments += ["--column", pair]
    with outputs(as_json) as output:
        _show(arguments, output, print_check)


@app.command()
@manual(
    examples=[
        (
            "eft data preview rows.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct",
            "Show trained and truncated tokens of each row.",
        )
    ],
    exits={ExitCode.USAGE: "a file has a fault, or the usage is wrong"},
)
def preview(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Training rows.")],
    model: Annotated[str | None, typer.Option(help="Hub id, local folder or .gguf file.")] = None,
    settings: SetOption = None,
    spec: Annotated[str | None, typer.Option(help="Job file with options.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact hubs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Preview what training would do with a file: tokens, truncated and duplicate rows, padding, and sample rows with
    their trained tokens. Needs only the model's tokenizer."""
    arguments = ["preview", file]
    for name, value in (("--model", model), ("--spec", spec)):
        arguments += [name, value] if value is not None else []
    for setting in settings or ():
        arguments += ["--set", setting]
    with outputs(as_json) as output:
        _show([*arguments, *(["--offline"] if offline else [])], output, print_preview)


def _show(arguments: list[str], output: Output, draw: Any) -> None:
    """Run the application, and show each of its documents."""
    call, environment = command(application_home(), "core.train.entry.data", arguments)
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        for line in child.stdout:
            document = json.loads(line)
            if "error" in document:
                raise _failed(document["error"])
            output.json(document) if output.as_json else draw(document, output.data)
    if child.returncode == 1:
        raise typer.Exit(ExitCode.USAGE)
    if child.returncode != 0:
        raise LocalError(f"the check ended with {child.returncode}")


def _failed(error: dict[str, Any]) -> EftClientError:
    found = UsageFault(error["message"], field=error.get("field"))
    found.code = error["code"]
    return found


@manual(examples=[("eft samples job-01kar3v8x5m2h6n9qst4wyz0bc", "Compare answers before and after, by prompt.")])
def samples(
    job: JobArgument,
    step: Annotated[
        int | None, typer.Option(help="Step of the evaluation. Default: that of the exported weights.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a job's samples beside those of the untrained model (`evaluation.samples`)."""
    with session(as_json, url) as (client, output):
        found = client.samples(job, step=step)
        output.json(found) if as_json else print_samples(found, output.data)


@manual(
    examples=[
        ("eft rollouts job-01kar3v8x5m2h6n9qst4wyz0bc", "Print the newest answers with their rewards."),
        (
            "eft rollouts job-01kar3v8x5m2h6n9qst4wyz0bc --step 1 --json",
            "Print those of the first step as JSON, with what is needed for the next page.",
        ),
    ]
)
def rollouts(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(min=1, help="Step that learned from them. Default: the newest.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many answers.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Answers to print at most.")] = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the answers that a step of reinforcement learning used, with rewards and advantages."""
    with session(as_json, url) as (client, output):
        found = client.rollouts(job, step=step, offset=offset, limit=limit)
        output.json(found) if as_json else print_rollouts(found, output.data)
