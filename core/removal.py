"""Removal of files and folders that others may be reading: renamed first, so that no reader finds half of one.

What a process that was killed leaves behind has the prefix that its caller gave, and is swept by that name.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def set_aside(path: Path, prefix: str) -> Path:
    """Rename within the same folder to a name with this prefix, and return the new path. OSError when it is gone."""
    aside = path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex}")
    path.rename(aside)
    return aside


def delete_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a file, a symbolic link, or a folder with everything in it. `ignore_errors`: leave what cannot be
    deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path, prefix: str, *, ignore_errors: bool = False) -> None:
    """Set aside, then delete. OSError when it cannot be renamed: another process was faster, or it is not ours."""
    delete_tree(set_aside(path, prefix), ignore_errors=ignore_errors)


@contextmanager
def removing(prefix: str) -> Iterator[Callable[[Path], None]]:
    """Give a function that sets a folder aside, where there is one. Those folders are deleted when the block ends, and
    renamed back when it raises: put a transaction into the block, and rows and folders go together."""
    aside: list[tuple[Path, Path]] = []

    def go(folder: Path) -> None:
        if folder.is_dir():
            aside.append((folder, set_aside(folder, prefix)))

    try:
        yield go
    except BaseException:
        for folder, there in aside:
            there.rename(folder)
        raise
    for _, there in aside:
        delete_tree(there)
