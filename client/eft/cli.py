"""The `eft` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eft import (
    commands,
    commands_access,
    commands_box,
    commands_data,
    commands_files,
    commands_gpu,
    commands_queue,
    commands_webhooks,
    commands_worker,
)
from eft.client import Client
from eft.config import load_config, write_config
from eft.errors import EXIT_MEANINGS, ConfigError
from eft.session import JsonOption, UrlOption, outputs, session
from eft.version import VERSION

EPILOG = "Exit codes:\n\n" + "\n\n".join(f"{int(code):>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items())

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fine-tune language models on the lab's own GPU box. EFT_URL and EFT_API_KEY say where it is.",
    epilog=EPILOG,
)
for verb in (
    commands.submit,
    commands.ls,
    commands.show,
    commands.watch,
    commands.logs,
    commands.metrics,
    commands_data.samples,
    commands.download,
    commands.pause,
    commands.resume,
    commands.retry,
    commands.priority,
    commands.cancel,
    commands_queue.queue,
    commands_queue.usage,
    commands_queue.gc,
    commands_access.whoami,
    commands_access.audit,
):
    app.command()(verb)
app.add_typer(commands_files.app, name="files")
app.add_typer(commands_data.app, name="data", rich_help_panel="On the box itself")
app.add_typer(commands_worker.app, name="worker")
app.add_typer(commands_gpu.gpu, name="gpu")
app.add_typer(commands_gpu.maintenance, name="maintenance")
app.add_typer(commands_queue.quota, name="quota")
app.add_typer(commands_webhooks.app, name="webhooks")
app.add_typer(commands_access.keys, name="keys")
app.add_typer(commands_access.users, name="users")
app.add_typer(commands_access.projects, name="projects")
commands_box.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"eft {VERSION}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def login(
    url: UrlOption = None,
    key_from_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the key from stdin.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep address and key in ~/.config/eft/config.toml (0600), after a try of both."""
    with outputs(as_json) as output:
        address = load_config(url, None).url
        key = (
            sys.stdin.readline().strip() if key_from_stdin else typer.prompt(f"API key for {address}", hide_input=True)
        )
        if not key:
            raise ConfigError("no key was given")
        with Client(address, key) as client:
            client.access.me()
        path = write_config(address, key)
        output.json({"url": address, "config": str(path)}) if as_json else output.note(f"kept in {path}")


@app.command()
def version(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The versions of client and server."""
    with session(as_json, url) as (client, output):
        server = client.version()
        if as_json:
            output.json({"client": VERSION, "server": server})
        else:
            output.text(f"client {VERSION}, server {server.get('version', '?')} at {client.config.url}\n")


def main() -> None:
    app(prog_name="eft")


if __name__ == "__main__":
    main()
