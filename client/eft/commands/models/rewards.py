"""`eft rewards try FILE`: what answers of the untrained model are rewarded with, before a training is submitted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from eft.commands.waiting import no_result
from eft.errors import ExitCode
from eft.jobfile import apply_settings, checked_first, read_job, uploader
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.trial import ALIKE, print_trial
from eft.types import File

app = App(no_args_is_help=True, help="Rewards of jobs that learn from answers (docs/rollouts.md).")


@app.command("try")
@manual(
    examples=[
        ("eft rewards try job.yaml", "Show which rewards 32 prompts' answers get, and what a step takes."),
        (
            "eft rewards try job.yaml --set stage.temperature=1.2 --json | jq .result.share_alike",
            "The share of groups that teach nothing, with other draws.",
        ),
    ],
    exits={
        ExitCode.USAGE: "the rewards teach nothing (submitting the job would be refused), or wrong usage or input",
        ExitCode.FAILED: "the trial failed",
    },
)
def try_rewards(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Job file, YAML or JSON; - reads stdin.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field, e.g. stage.temperature=1.2.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Upload this file and take its prompts.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the untrained model answer 32 prompts of a job, and reward the answers: histogram of the rewards, groups that
    teach nothing, answers cut off, tokens and seconds of a step. Nothing is trained. It waits for a training slot as
    the job would; data files are uploaded."""
    with session(as_json, url) as (client, output):
        job, folder = read_job(source)
        job = apply_settings(job, settings or [])

        def told(path: Path, file: File) -> None:
            output.note(f"{path} is {file.id} ({file.rows} rows)")

        given = {} if data is None else {"train": data}
        job = checked_first(client, job, folder, given, uploader(client, told))
        with output.notes.status("waiting for a slot") if output.live else nullcontext():
            found = client.try_rewards(job)
        if as_json:
            output.json(found)
        elif found["result"] is not None:
            print_trial(found["result"], output.data)
        else:
            raise no_result(found)
        if found["result"] is None:
            raise typer.Exit(ExitCode.FAILED)
        if found["result"]["share_alike"] > ALIKE:
            raise typer.Exit(ExitCode.USAGE)
