"""A full disk, told from other errors, and told to the worker even where no event can be written any more."""

from __future__ import annotations

import errno
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from core.errors import EftError, NoSpace
from core.spec.run.exit_codes import EXIT_DATA_ROOT_LOST, EXIT_FAILED, EXIT_NO_SPACE
from core.train.base.events import EventWriter, NullEventWriter

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FAILING = {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
"""A broken disk, or a share whose server does not answer or has forgotten the file."""
_NATIVE = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which is written in Rust, says it."""


def disk_full(error: BaseException) -> bool:
    """No space, a quota used up, or a limit on the size of files."""
    return isinstance(error, NoSpace) or _number(error) in _FULL


def disk_failing(error: BaseException) -> bool:
    """The file system could not read or write, for no fault of the run."""
    return _number(error) in _FAILING


def _number(error: BaseException) -> int | None:
    """The system's number of an error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return None if (found := _NATIVE.search(str(error))) is None else int(found[1])


def check_room(folder: Path, needs: int) -> None:
    """Raises NoSpace rather than fill a disk to its last byte for a checkpoint that does not fit."""
    free = shutil.disk_usage(folder).free
    if free < needs:
        raise no_room_for_checkpoint(needs, f"{free >> 20} MiB are free")


def no_room_for_checkpoint(needs: int, why: str) -> NoSpace:
    return NoSpace(f"its checkpoint of {(needs >> 20) + 1} MiB does not fit: {why}", needs_bytes=needs)


def print_traceback(error: BaseException) -> None:
    """To the log; not where the error's message is made for users, and says all there is to say."""
    if not isinstance(error, EftError):
        traceback.print_exception(error, file=sys.stderr)


def tell_failure(error: BaseException, events: EventWriter, payload: dict[str, Any]) -> int:
    """`payload` as the error event, and into the log, there with a traceback; the exit code. On a full disk the code
    alone must do, and where the data root is gone: an event would go to a file that nobody finds."""
    try:
        print_traceback(error)
        if isinstance(events, NullEventWriter):  # a rank beside the first under torchrun: nobody else says it
            print(f"{payload['code']}: {payload['message']}", file=sys.stderr)
        if not isinstance(events, NullEventWriter) and not events.path.exists():
            return EXIT_DATA_ROOT_LOST
        events.write("error", **payload)
    except OSError as second:
        if not disk_full(second):
            raise
        return EXIT_NO_SPACE
    return EXIT_NO_SPACE if disk_full(error) else EXIT_FAILED
