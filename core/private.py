"""The data root is its user's alone, however it was made: hashes of keys, secrets, prompts and models lie there.

What a process of eft makes is private from its first line on (`umask`); what was there before is closed (`close`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from core.errors import EftError

log = logging.getLogger("eft.data")

OTHERS = 0o077
"""All that group and others may have."""


class OpenDataRoot(EftError):
    """Others may look inside, and this user cannot change that."""

    code = "open_data_root"


def umask() -> None:
    """Everything that this process and its children make from now on is for this user alone."""
    os.umask(OTHERS)


def close(root: Path) -> None:
    """Close an existing data root and its top-level entries to group and others, and log it. Raises OpenDataRoot."""
    try:
        if root.stat().st_mode & OTHERS:
            mode = stat.S_IMODE(root.stat().st_mode)
            root.chmod(mode & ~OTHERS)
            log.warning("%s was open to other users of this box (mode %o) and is now closed to them", root, mode)
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise OpenDataRoot(
            f"other users of this box can read {root}, and user {os.geteuid()} cannot change that: "
            f"`chmod 700 {root}` as its owner, or name a folder below it (EFT_DATA={root}/eft)"
        ) from error
    for entry in _open(root):
        with contextlib.suppress(FileNotFoundError):  # the database's journal comes and goes
            entry.chmod(stat.S_IMODE(entry.lstat().st_mode) & ~OTHERS)


def _open(root: Path) -> Iterator[Path]:
    """Folders and files of this user's at the top of the data root: the database, logs, what other versions made."""
    for entry in root.iterdir():
        try:
            seen = entry.lstat()
        except FileNotFoundError:
            continue
        if (
            seen.st_mode & OTHERS
            and seen.st_uid == os.geteuid()
            and (stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode))
        ):
            yield entry
