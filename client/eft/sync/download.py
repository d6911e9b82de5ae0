# Written by client/unasync.py from ../aio/download.py: change that one.
"""Downloads that can go on where they broke off, and are whole or not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from eft.errors import DownloadError, LocalError, Unreachable
from eft.http.download import CHUNK, Advance, Part, is_there
from eft.sync import io
from eft.sync.transport import Transport


def fetch(
    transport: Transport, url: str, target: Path, *, size: int, sha256: str, patience: float, advance: Advance
) -> None:
    """Bring `url` to `target`: beside it first, checked against `sha256`, then renamed in one step.

    Whatever an earlier, broken-off download of the same content has left is gone on from. Raises DownloadError,
    LocalError, ApiError, Unreachable.
    """
    try:
        if io.run(partial(is_there, target, sha256)):
            advance(size)
            return
        part = io.run(partial(Part, target, sha256, advance))
        try:
            _fill(transport, url, part, size=size, sha256=sha256, patience=patience)
            io.run(part.finish)
        finally:
            part.close()
    except OSError as error:
        raise LocalError(f"{target}: {error.strerror or error}") from error


def _fill(transport: Transport, url: str, part: Part, *, size: int, sha256: str, patience: float) -> None:
    resumed = part.bytes > 0

    def attempt() -> None:
        have = part.bytes
        # Identity: a range of a compressed representation would be another range.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with transport.stream("GET", url, headers=headers) as response:
            if have and response.status_code != 206:
                part.start_over()  # no ranges here: the whole file comes again
            for received in response.iter_bytes(CHUNK):
                io.run(partial(part.add, received))
        if part.bytes < size:
            raise Unreachable(f"the download of {url} broke off at byte {part.bytes} of {size}")

    while True:
        while part.bytes < size:
            before = part.bytes
            try:
                transport.persist(attempt, patience)
            except Unreachable:
                # A connection that breaks again and again, yet brings something each time, is getting there.
                if part.bytes <= before:
                    raise
        if part.bytes == size and part.sha256 == sha256:
            return
        part.start_over()
        if not resumed:
            part.discard()
            raise DownloadError(f"{url} came damaged: its SHA-256 is not the one that the server lists; try again")
        resumed = False  # what an earlier download left may have been the damaged part
