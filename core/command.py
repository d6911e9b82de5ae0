"""The one place where a program of the service ends: its exit status, and words in place of a traceback."""

from __future__ import annotations

import gc
import os
import sqlite3
import sys
from collections.abc import Callable
from typing import NoReturn

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from core.errors import EftError
from core.settings import SettingsError

EXIT_FAILED = 1
EXIT_NOT_NOW = 75
"""EX_TEMPFAIL of sysexits.h: it waits for something that comes back by itself."""
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: starting again will not help before somebody has changed something."""
EXIT_INTERRUPTED = 130


def run(name: str, main: Callable[[], int | None]) -> NoReturn:
    """Ends the process as `main` says. What it could not know of beforehand (a setting, the database, a path, Ctrl-C)
    is printed as `NAME: words` on stderr; any other exception is a defect, and shows its traceback."""
    gc.freeze()  # all that is imported stays: it is not looked through for garbage, now or at the end
    try:
        status = main() or 0
    except SettingsError as error:
        status = _say(EXIT_CONFIG, name, *error.faults, "docs/settings.md has every setting")
    except EftError as error:
        status = _say(EXIT_FAILED, name, error.message)
    except SQLAlchemyError as error:
        status = _say(EXIT_FAILED, name, database_words(error))
    except KeyboardInterrupt:
        status = _say(EXIT_INTERRUPTED, name, "interrupted")
    except BrokenPipeError:  # the reader has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        status = EXIT_FAILED
    except OSError as error:
        status = _say(EXIT_FAILED, name, os_words(error))
    sys.exit(status)


def database_words(error: SQLAlchemyError) -> str:
    """What the driver said, without SQLAlchemy's link and the statement."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    said = str(cause).partition("\n(Background on")[0].partition("\n[SQL:")[0].strip()
    where = "EFT_DATA and EFT_DATABASE_URL" if isinstance(cause, sqlite3.Error) else "EFT_DATABASE_URL"
    return f"the database cannot be used ({said or type(cause).__name__}); see {where}"


def os_words(error: OSError) -> str:
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    said = error.strerror or str(error) or type(error).__name__
    return f"{place}: {said}" if place else said


def _say(status: int, name: str, *lines: str) -> int:
    for line in lines:
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    return status
