"""`eft help|man|login|version`: the command about itself."""

from __future__ import annotations

import getpass
import shutil
import subprocess
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from eft.config import load_config, write_config
from eft.errors import ConfigError, UsageFault
from eft.manual.source import find, manual, page, pages
from eft.session import JsonOption, UrlOption, outputs, session
from eft.version import VERSION

CommandArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[COMMAND]...", help="A command, e.g. keys create. Default: eft itself.")
]


@manual(examples=[("eft help submit", "Options, examples and exit codes of one command.")])
def show_help(context: typer.Context, command: CommandArgument = None) -> None:
    """Print the manual page of a command, the same as its --help."""
    from eft.manual.terminal import show

    with outputs(False):
        show(page(_found(context, command or []), tuple(command or ())))


@manual(
    examples=[
        ("eft man", "Read the whole manual."),
        ("eft man submit > eft-submit.1", "One command's page, for man(1)."),
    ]
)
def man(context: typer.Context, command: CommandArgument = None) -> None:
    """Show the manual with man(1). In a pipe or a file, print the page itself (roff) for installation."""
    from eft.manual.formats import roff

    with outputs(False):
        text = roff(list(pages(_found(context, command or []), tuple(command or ()))))
        if sys.stdout.isatty() and (reader := shutil.which("man")):
            subprocess.run([reader, "-l", "-"], input=text, text=True, check=False)
        else:
            sys.stdout.write(text)


@manual(
    examples=[
        ("source <(eft completion bash)", "In ~/.bashrc, or ~/.zshrc with zsh, below compinit."),
        ("eft completion fish > ~/.config/fish/completions/eft.fish", "For fish, run once."),
    ]
)
def completion(
    shell: Annotated[
        str | None, typer.Argument(metavar="[SHELL]", help="bash, zsh or fish. Default: by SHELL.")
    ] = None,
) -> None:
    """Print the script that completes commands, options, and the ids of jobs, files, nodes, GPUs, keys and users."""
    from eft.manual.completion import SCRIPTS, shell_of_user

    with outputs(False) as output:
        chosen = shell or shell_of_user()
        if chosen is None or chosen not in SCRIPTS:
            raise UsageFault(f"there is a script for {', '.join(SCRIPTS)}: eft completion SHELL", field="shell")
        output.text(SCRIPTS[chosen])


def complete(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(help="Behind eft, the last one unfinished.")] = None,
) -> None:
    """What completion may offer; called by the shells' scripts."""
    from eft.manual.completion import answer

    sys.stdout.write(answer(context.find_root().command, words or [""]))


def _found(context: typer.Context, path: list[str]) -> Any:
    root = context.find_root().command
    command = find(root, path)
    if command is None:
        known = [" ".join(one.path) for one in pages(root) if one.path]
        near = get_close_matches(" ".join(path), known, n=1)
        hint = f"did you mean `eft help {near[0]}`?" if near else "`eft --help` lists them"
        raise UsageFault(f"there is no command `eft {' '.join(path)}`; {hint}")
    return command


@manual(examples=[("eft login --url https://box.lab:8321", "Save address and key; prompts for the key.")])
def login(
    url: UrlOption = None,
    key_from_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the key from stdin.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify address and key, and save them to ~/.config/eft/config.toml (0600)."""
    from eft.client import Client

    with outputs(as_json) as output:
        address = load_config(url, None).url
        key = sys.stdin.readline().strip() if key_from_stdin else _ask(f"API key for {address}: ")
        if not key:
            raise ConfigError("no key was given")
        with Client(address, key) as client:
            client.access.me()
        path = write_config(address, key)
        output.json({"url": address, "config": str(path)}) if as_json else output.note(f"kept in {path}")


def _ask(question: str) -> str:
    """What is typed, unseen. Raises UsageFault where there is no terminal to type on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageFault("there is no terminal to ask for the key on; pipe it in: eft login --key-stdin < FILE")
    try:
        return getpass.getpass(question, stream=sys.stderr).strip()
    except EOFError:
        return ""


@manual(examples=[("eft version --json", "Versions for a bug report.")])
def version(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The versions of client and server."""
    with session(as_json, url) as (client, output):
        server = client.version()
        if as_json:
            output.json({"client": VERSION, "server": server})
        else:
            output.text(f"client {VERSION}, server {server.get('version', '?')} at {client.config.url}\n")
