"""The one place where whatever goes wrong in a command becomes words on stderr and an exit code of the table."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager

import typer

from eft.errors import EftClientError, ExitCode, LocalError, UsageFault
from eft.terminal.output import Output, print_error

TRACEBACK = "EFT_TRACEBACK"
"""Set to anything, a defect shows where it is."""


class Defect(EftClientError):
    """Nothing that a person did: a fault of this command."""

    code = "internal"


@contextmanager
def told(as_json: bool) -> Generator[None, None, None]:
    """What is raised below ends the command: told on stderr, with its exit code and without a traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        Output.make(as_json).note("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from error
    except typer.Abort as error:  # of a question on the terminal
        Output.make(as_json).note("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from error
    except EftClientError as error:
        _end(error, as_json, error)
    except OSError as error:
        if error.errno == errno.EPIPE:  # `eft ls | head`: the framework ends quietly
            raise
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "this machine"
        _end(LocalError(f"{place}: {error.strerror or error}"), as_json, error)
    except UnicodeEncodeError as error:  # an argument in another encoding, or one that HTTP cannot carry
        _end(UsageFault(f"{error.object[:40]!r} cannot be sent: {error.reason}"), as_json, error)
    except Exception as error:
        # The framework's own (a wrong option, an exit code) have their words already.
        if hasattr(error, "exit_code"):
            raise
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        words = f"{type(error).__name__}: {error}. This is a defect of the command; {TRACEBACK}=1 shows where it is"
        _end(Defect(words), as_json, error)


def _end(told: EftClientError, as_json: bool, cause: BaseException) -> None:
    print_error(told, Output.make(as_json))
    raise typer.Exit(told.exit_code) from cause
