"""For tests of the client: the `eft` command, and a bad line between it and the API."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from eft import Client
from eft.cli import tree

EFT = str(Path(sys.executable).parent / "eft")


def environment(api: Any, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EFT_") and k not in ("NO_COLOR", "FORCE_COLOR")}
    return clean | {"EFT_URL": api.url, "EFT_API_KEY": api.key, "XDG_CONFIG_HOME": "/nonexistent"} | more


def run(*arguments: str, given: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`eft` in this process: starting the command costs more than most of what it does.

    Exit codes, standard output and standard error are the command's own. For signals, pipes and terminals start EFT.
    `given`: its whole environment, if not this process's.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    code: object = 0
    with (
        mock.patch.dict(os.environ, os.environ if given is None else given, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            _tree().main(list(arguments), "eft")
        except SystemExit as ended:
            code = ended.code or 0
    for stream in (out, err):
        stream.flush()
    said, told = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert isinstance(code, int) and "Traceback" not in told, (arguments, told)
    return subprocess.CompletedProcess(["eft", *arguments], code, said, told)


@functools.cache
def _tree() -> Any:
    """Built once, which takes longer than most commands."""
    return tree()


def eft(api: Any, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`eft` with this API and its first key, in this process."""
    return run(*arguments, given=environment(api, **more))


def client(api: Any, url: str | None = None, **more: Any) -> Client:
    return Client(url or api.url, api.key, **more)


class Cutter:
    """In front of the API: drops each connection after so many bytes of answer, for as long as `cuts` has numbers."""

    def __init__(self, url: str) -> None:
        self.cuts: list[int] = []
        self.connections = 0
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                connection, _ = self._server.accept()
                self.connections += 1
                threading.Thread(target=self._pump, args=(connection,), daemon=True).start()

    def _pump(self, near: socket.socket) -> None:
        left = self.cuts.pop(0) if self.cuts else None
        with near, socket.create_connection(self._target) as far, contextlib.suppress(OSError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if ready is far and left is not None:
                        data, left = data[:left], left - len(data[:left])
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)
                    if left == 0:  # the rest may have come in the same piece: nothing more would arrive
                        return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
