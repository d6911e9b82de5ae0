"""The `eft` command: what there is, in the order in which help shows it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.main import get_command

from eft.commands import (
    again,
    artifacts,
    checkpoints,
    data,
    export,
    files,
    help,
    jobs,
    labels,
    look,
    plan,
)
from eft.commands.admin import access, box, gpu, queue, webhooks, worker
from eft.commands.models import pipelines, push, registry, rewards, serve, sessions, sweeps
from eft.manual.source import HEADINGS, manual
from eft.terminal.app import App, Root
from eft.version import VERSION

JOBS, DATA, MODELS, LINE, PEOPLE, BOX, SELF = HEADINGS

app = App(
    cls=Root,
    no_args_is_help=True,
    add_completion=False,  # ours: `eft completion`
    pretty_exceptions_enable=False,
    help="Fine-tune language models on your lab's own GPUs. EFT_URL and EFT_API_KEY select the server.",
)
NAMES: dict[Any, str] = {artifacts.open_it: "open", help.show_help: "help"}
"""Where Python has taken the word."""

verb: Any
for verb in (
    jobs.submit,
    again.clone,
    plan.plan,
    jobs.ls,
    jobs.show,
    look.watch,
    look.logs,
    look.metrics,
    look.compare,
    look.diff,
    look.trace,
    jobs.check,
    data.samples,
    data.rollouts,
    artifacts.download,
    artifacts.open_it,
    jobs.pause,
    jobs.resume,
    again.retry,
    jobs.priority,
    jobs.cancel,
    jobs.delete,
    labels.tag,
    labels.note,
    labels.archive,
    labels.unarchive,
):
    app.command(NAMES.get(verb), rich_help_panel=JOBS)(verb)
app.command("jobs", hidden=True)(jobs.ls)
app.command("status", hidden=True)(jobs.status)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel=JOBS)
app.add_typer(rewards.app, name="rewards", rich_help_panel=MODELS)
app.add_typer(registry.app, name="models", rich_help_panel=MODELS)
app.command(rich_help_panel=MODELS)(push.push)
app.command(rich_help_panel=MODELS)(serve.serve)
app.command(rich_help_panel=MODELS)(pipelines.lineage)
app.add_typer(pipelines.app, name="pipelines", rich_help_panel=MODELS)
app.add_typer(sweeps.app, name="sweep", rich_help_panel=MODELS)
app.add_typer(sessions.app, name="sessions", rich_help_panel=MODELS)
app.add_typer(files.app, name="files", rich_help_panel=DATA)
app.add_typer(data.app, name="data", rich_help_panel=DATA)
app.command(rich_help_panel=LINE)(queue.queue)
app.add_typer(gpu.gpu, name="gpu", rich_help_panel=LINE)
app.command("nodes", rich_help_panel=LINE)(worker.list_nodes)
app.add_typer(worker.app, name="worker", rich_help_panel=LINE)
app.add_typer(gpu.maintenance, name="maintenance", rich_help_panel=LINE)
app.command(rich_help_panel=LINE)(queue.usage)
app.add_typer(queue.quota, name="quota", rich_help_panel=LINE)
app.command(rich_help_panel=LINE)(queue.gc)
app.command(rich_help_panel=PEOPLE)(access.whoami)
app.add_typer(access.keys, name="keys", rich_help_panel=PEOPLE)
app.add_typer(access.users, name="users", rich_help_panel=PEOPLE)
app.add_typer(export.projects, name="projects", rich_help_panel=PEOPLE)
app.add_typer(webhooks.app, name="webhooks", rich_help_panel=PEOPLE)
app.command(rich_help_panel=PEOPLE)(access.audit)
box.register(app, BOX)
for verb in (
    help.login,
    help.version,
    help.show_help,
    help.man,
    help.completion,
):
    app.command(NAMES.get(verb), rich_help_panel=SELF)(verb)


app.command(
    "__complete",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(help.complete)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"eft {VERSION}\n")
        raise typer.Exit


@app.callback()
@manual(
    examples=[
        ("eft submit job.yaml --wait", "Train, and end as the job does."),
        ("eft watch", "See everything that runs and waits."),
        ("eft download job-01kar3v8x5m2h6n9qst4wyz0bc", "Bring home what a job has made."),
    ]
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of this command.")
    ] = False,
) -> None:
    pass


def tree() -> Any:
    """All commands, as typer has built them."""
    return get_command(app)


def main() -> None:
    app(prog_name="eft")


if __name__ == "__main__":
    main()
