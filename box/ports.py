"""Can the service listen where it is to, and who does already."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

LISTENING = "0A"
"""State of a socket in /proc/net/tcp (proc(5))."""


def obstacle(host: str, port: int) -> str | None:
    """In words, why nothing can listen on that address; None: something can. Port 0 is any free one."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "that is not a name"
        return f"{host} is not an address of this machine ({said}); --host (EFT_HOST) names one, 127.0.0.1 for itself"
    try:
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the API does: one that has just ended
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                who = f" by {holder}" if (holder := listener(port)) else ""
                return f"port {port} of {host} is taken{who}: stop that one, or choose another port with --port"
            case errno.EACCES:
                return f"port {port} may not be used by user {os.geteuid()}: choose one from 1024 on with --port"
            case errno.EADDRNOTAVAIL:
                return f"{host} is not an address of this machine: --host (EFT_HOST) names one of its own"
            case _:
                return f"nothing can listen on {host} port {port}: {error.strerror}"
    return None


def listener(port: int) -> str | None:
    """The process that listens on a port, as `process 4711 (python)`; None where this user may not know."""
    inodes = _listening(port)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(
                str(one.readlink()).removeprefix("socket:[").removesuffix("]") in inodes for one in folder.glob("fd/*")
            ):
                return f"process {folder.name} ({(folder / 'comm').read_text().strip()})"
        except OSError:  # another user's, or gone
            continue
    return None


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
