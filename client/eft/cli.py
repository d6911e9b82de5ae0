"""The `eft` command: what there is, in the order in which help shows it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.main import get_command

from eft import (
    commands,
    commands_access,
    commands_artifacts,
    commands_box,
    commands_data,
    commands_export,
    commands_files,
    commands_gpu,
    commands_help,
    commands_look,
    commands_plan,
    commands_queue,
    commands_webhooks,
    commands_worker,
)
from eft.app import HEADINGS, App, Root
from eft.manual import manual
from eft.version import VERSION

JOBS, DATA, LINE, PEOPLE, BOX, SELF = HEADINGS

app = App(
    cls=Root,
    no_args_is_help=True,
    add_completion=False,  # ours: `eft completion`
    pretty_exceptions_enable=False,
    help="Fine-tune language models on the lab's own GPU box. EFT_URL and EFT_API_KEY say where it is.",
)
NAMES: dict[Any, str] = {commands_artifacts.open_it: "open", commands_help.show_help: "help"}
"""Where Python has taken the word."""

verb: Any
for verb in (
    commands.submit,
    commands_plan.plan,
    commands.ls,
    commands.show,
    commands_look.watch,
    commands_look.logs,
    commands_look.metrics,
    commands_look.compare,
    commands_look.diff,
    commands.check,
    commands_data.samples,
    commands_artifacts.download,
    commands_artifacts.open_it,
    commands.pause,
    commands.resume,
    commands.retry,
    commands.priority,
    commands.cancel,
    commands.delete,
):
    app.command(NAMES.get(verb), rich_help_panel=JOBS)(verb)
app.add_typer(commands_files.app, name="files", rich_help_panel=DATA)
app.add_typer(commands_data.app, name="data", rich_help_panel=DATA)
app.command(rich_help_panel=LINE)(commands_queue.queue)
app.add_typer(commands_gpu.gpu, name="gpu", rich_help_panel=LINE)
app.command("nodes", rich_help_panel=LINE)(commands_worker.list_nodes)
app.add_typer(commands_worker.app, name="worker", rich_help_panel=LINE)
app.add_typer(commands_gpu.maintenance, name="maintenance", rich_help_panel=LINE)
app.command(rich_help_panel=LINE)(commands_queue.usage)
app.add_typer(commands_queue.quota, name="quota", rich_help_panel=LINE)
app.command(rich_help_panel=LINE)(commands_queue.gc)
app.command(rich_help_panel=PEOPLE)(commands_access.whoami)
app.add_typer(commands_access.keys, name="keys", rich_help_panel=PEOPLE)
app.add_typer(commands_access.users, name="users", rich_help_panel=PEOPLE)
app.add_typer(commands_export.projects, name="projects", rich_help_panel=PEOPLE)
app.add_typer(commands_export.projects, name="project", hidden=True)  # as people say of one
app.add_typer(commands_webhooks.app, name="webhooks", rich_help_panel=PEOPLE)
app.command(rich_help_panel=PEOPLE)(commands_access.audit)
commands_box.register(app, BOX)
for verb in (
    commands_help.login,
    commands_help.version,
    commands_help.show_help,
    commands_help.man,
    commands_help.completion,
):
    app.command(NAMES.get(verb), rich_help_panel=SELF)(verb)


app.command(
    "__complete",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(commands_help.complete)


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
