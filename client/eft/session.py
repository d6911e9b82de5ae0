"""What every command shares: the options, and the client."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from eft.http import paths
from eft.terminal.output import Output

if TYPE_CHECKING:
    from eft.client import Client

JsonOption = Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the server. Default: EFT_URL, the login, or this machine.")
]
HANDLE = "id, beginning of an id, name, or `last`, your newest"
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help=f"A job: {HANDLE}.")]
JobArguments = Annotated[list[str], typer.Argument(metavar="JOB...", help=f"Jobs: {HANDLE}.")]


@contextmanager
def outputs(as_json: bool) -> Generator[Output, None, None]:
    """Where a command prints; what goes wrong below is told by eft.runner, around all of them."""
    yield Output.make(as_json)


@contextmanager
def session(as_json: bool, url: str | None) -> Generator[tuple[Client, Output], None, None]:
    from eft.client import Client  # not before it is needed: help and completion are quick

    with outputs(as_json) as output, Client(url) as client:
        yield client, output


def job_id_of(client: Client, handle: str) -> str:
    """The id that `handle` means now. What asks several times must keep to one job, also when another gets its name."""
    return handle if paths.is_id(handle) else client.get(handle).id
