"""Log files that do not grow without bound, and lose no line that is still to be kept.

A service's own log (`keep`): the process that writes it gives the full file another name, opens a new one and puts it
under its descriptors 1 and 2. What was written before lies in the old file, what comes after in the new one, also what
a crashing library or the interpreter itself writes; `tail -F` follows; and a SIGKILL at any point leaves whole files.

A run's log (`bound`): its writers are a trainer and whatever that has started, which cannot be asked to open another
file. So its oldest part is given back to the disk in place (a hole, fallocate(2)): the place of every later byte in the
file stays what it was, and a reader that follows by offsets neither misses a line nor sees one twice.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger("eft.logs")

LOOK_SECONDS = 5.0
BLOCK = 4096
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)


# -- of a service


def keep(path: Path, most: int, files: int) -> threading.Thread:
    """Send this process's output to `path` from now on, and begin a new file whenever it has `most` bytes; `files` full
    ones stay: PATH.1 (the newest) to PATH.N. The thread that looks after it ends with the process."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _put_under_output(_open(path))

    def look() -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_SECONDS):
            try:
                if (size := os.fstat(1).st_size) >= most:
                    _begin_anew(path, files, size, most)
            except OSError as error:
                log.warning("%s cannot be rotated: %s", path, error)

    thread = threading.Thread(target=look, name="eft-logfile", daemon=True)
    thread.start()
    return thread


def _begin_anew(path: Path, files: int, size: int, most: int) -> None:
    """The new file is there before the old one loses its name: where there is no descriptor or no room for it, nothing
    has changed. A log of twice its size that still cannot be rotated is truncated in place, and says so."""
    beside = path.with_name(f"{path.name}.0")
    try:
        descriptor = _open(beside)
    except OSError as error:
        if size < 2 * most:
            raise
        os.ftruncate(1, 0)
        log.warning("%s: its %d bytes were discarded, because it cannot be rotated: %s", path, size, error)
        return
    try:
        rotate(path, files)
        beside.replace(path)
    except OSError:
        os.close(descriptor)
        raise
    _put_under_output(descriptor)


def rotate(path: Path, files: int) -> None:
    """PATH becomes PATH.1, that PATH.2, and so on up to PATH.`files`; the one before is gone. No PATH is fine."""
    for number in range(files - 1, 0, -1):
        _move(path.with_name(f"{path.name}.{number}"), path.with_name(f"{path.name}.{number + 1}"))
    if files:
        _move(path, path.with_name(f"{path.name}.1"))
    else:
        path.unlink(missing_ok=True)


def _move(old: Path, new: Path) -> None:
    try:
        old.replace(new)
    except FileNotFoundError:
        return


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _put_under_output(descriptor: int) -> None:
    try:
        for number in (1, 2):
            os.dup2(descriptor, number)
    finally:
        os.close(descriptor)


# -- of a run


def bound(path: Path, most: int) -> int:
    """Let a log that others append to take at most `most` bytes of the disk: of a longer one the newer half of that
    stays. Returns how many bytes went. OSError where the file cannot be opened."""
    try:
        if path.lstat().st_blocks * 512 <= most:  # nearly always
            return 0
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(descriptor).st_size
        first = first_byte(descriptor, size)
        if size - first <= most:
            return 0
        end = (size - most // 2) // BLOCK * BLOCK
        if end <= first:
            return 0
        if _punch(descriptor, end):
            return end - first
        return _cut(path, descriptor, size, most // 2)
    finally:
        os.close(descriptor)


def first_byte(descriptor: int, size: int) -> int:
    """Where what is left of a log begins; its size where nothing is."""
    if size == 0:
        return 0
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else 0  # a file system that does not know has no holes either


def _punch(descriptor: int, end: int) -> bool:
    """False: this file system cannot."""
    done = _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(0), ctypes.c_longlong(end))
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))


def _cut(path: Path, descriptor: int, size: int, stays: int) -> int:
    """Without holes (NFS before 4.2): the file is rewritten with its newest part. A line written just now may be
    lost, and a reader who follows sees that part again; a log line reports it."""
    newest = os.pread(descriptor, stays, size - stays)
    os.ftruncate(descriptor, 0)
    with path.open("ab", buffering=0) as file:
        file.write(f"[{size - stays} bytes of this log are no longer kept]\n".encode() + newest)
    log.warning("%s: cut to its newest %d KiB; this file system has no holes (NFS before 4.2)", path, stays >> 10)
    return size - stays
