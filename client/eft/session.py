"""What every command shares: the options, the client, and one place where errors become exit codes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from eft.errors import EftClientError, ExitCode, LocalError
from eft.output import Output, print_error

if TYPE_CHECKING:
    from eft.client import Client

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the server; else EFT_URL, the login, or this machine.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")]


@contextmanager
def outputs(as_json: bool) -> Generator[Output, None, None]:
    """Errors below end the command: told on stderr, with the exit code of the table."""
    output = Output.make(as_json)
    try:
        yield output
    except EftClientError as error:
        print_error(error, output)
        raise typer.Exit(error.exit_code) from error
    except BrokenPipeError:
        raise  # `eft ls | head`: the framework ends quietly
    except OSError as error:
        local = LocalError(f"{error.filename or 'this machine'}: {error.strerror or error}")
        print_error(local, output)
        raise typer.Exit(local.exit_code) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(ExitCode.INTERRUPTED) from error


@contextmanager
def session(as_json: bool, url: str | None) -> Generator[tuple[Client, Output], None, None]:
    from eft.client import Client  # not before it is needed: help and completion are quick

    with outputs(as_json) as output, Client(url) as client:
        yield client, output
