"""A port for a server that a test starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A free port that is nobody else's for as long as this lasts: bound here, without listening.

    One that was looked up and let go may be another's before the server has it, or between two servers on it. A server
    that sets SO_REUSEADDR, as asyncio's and http.server's do, may bind it all the same (socket(7)), and until it
    listens whoever connects is refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
