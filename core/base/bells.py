"""Bells: how processes that share the data root of a box wake each other.

A ring says that the database may have news. It may be lost, or come for nothing: whoever waits for one also looks from
time to time, as do processes of other boxes, which are not rung.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("eft.bells")

MOST = 4096
"""Rings that are read at once."""


class Bell:
    """A socket below the data root that others ring."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError where the file system has no sockets."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / name
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            with _reach(folder, name) as address:
                self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def heard(self) -> set[str]:
        """What was rung for since the last call."""
        found = set[str]()
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST):
                found.add(self._socket.recv(256).decode("ascii", "replace"))
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for a ring; False: none has come in this time."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        return bool(readable) and bool(self.heard())

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._socket.close()


def hung(folder: Path, name: str) -> Bell | None:
    """A bell, or None where there can be none: its owner looks more often then."""
    try:
        return Bell(folder, name)
    except OSError as error:
        log.warning("%s takes no sockets (%s): processes of this box look for news more often instead", folder, error)
        return None


def ring(folder: Path, pattern: str, what: str) -> None:
    """Ring the bells whose names match. Those whose owner has gone are taken down."""
    for path in folder.glob(pattern):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                with _reach(folder, path.name) as address:
                    sender.sendto(what.encode("ascii"), address)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # it has gone meanwhile, or has heard enough


@contextlib.contextmanager
def _reach(folder: Path, name: str) -> Iterator[str]:
    """The address of a socket, whose path may have more characters than addresses take."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
