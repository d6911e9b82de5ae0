"""Programs over libraries of their own (core/train/tools/install.py) as forks of a process that has imported what they
import: torch, transformers and the library, which take longer than a test's folder of two layers.

One process per program and libraries, started as the program would be. Its forks have the program's arguments and
output, and run its `main`. Each program starts cold either in tests/train/test_exports.py or in test_export_matrix.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn
from unittest import mock

from core.base import forks as base_forks
from core.base.process import die_with_parent

if TYPE_CHECKING:
    from core.train.tools.install import Tools

LIBRARIES = {
    "compressed": ("compressed_tensors.quantization", "transformers.quantizers.quantizer_compressed_tensors"),
    "torchao": ("torchao.quantization", "transformers.quantizers.quantizer_torchao"),
}
"""What programs over a set import once they run, by the first word of its folder's name."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""As a trainer starts programs."""
MESSAGE_BYTES = 1 << 16


class ToolFork:
    """The part of subprocess.Popen that `Tools.run` needs."""

    def __init__(self, server: Path, arguments: Sequence[str], output: IO[bytes]) -> None:
        self._code: int | None = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(str(server))
        socket.send_fds(self._line, [json.dumps(list(arguments)).encode()], [output.fileno()])

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self._code = int(self._line.recv(MESSAGE_BYTES) or b"-9")
            self._line.close()
        return self._code

    def kill(self) -> None:
        """The fork is killed when nobody waits for it any more."""
        if self._code is None:
            self._line.shutdown(socket.SHUT_WR)


class ToolForks:
    """Call `launch` in the place of that of core.base.forks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._otherwise = base_forks.launch
        self._servers: dict[tuple[str, str], tuple[Path, subprocess.Popen[bytes]]] = {}

    def prepare(self, program: Path, tools: Tools) -> None:
        """Start the process for the program. Others start cold. Call it before forks of this process run programs."""
        place = self._folder / str(len(self._servers))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(place))
            listening.listen()
            self._servers[str(program), tools.path] = (
                place,
                subprocess.Popen(
                    [sys.executable, "-P", __file__, str(program), str(listening.fileno())],
                    env=os.environ | ENVIRONMENT | {"PYTHONPATH": tools.path},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listening.fileno()],
                ),
            )

    def launch(self, command: Sequence[str], **options: Any) -> Any:
        _python, _safely, program, *arguments = command
        if (server := self._servers.get((program, options["env"].get("PYTHONPATH", "")))) is None:
            return self._otherwise(command, **options)
        return ToolFork(server[0], arguments, options["stdout"])

    def close(self) -> None:
        for _, server in self._servers.values():
            server.kill()
            server.wait()


@contextlib.contextmanager
def tool_forks() -> Iterator[ToolForks]:
    """Until its end, programs that are prepared are forks."""
    with tempfile.TemporaryDirectory() as folder:
        forks = ToolForks(Path(folder))
        try:
            with mock.patch.object(base_forks, "launch", forks.launch):
                yield forks
        finally:
            forks.close()


def serve(program: Path, listening: socket.socket) -> NoReturn:
    """Fork for each that connects."""
    die_with_parent(signal.SIGKILL)
    spec = importlib.util.spec_from_file_location("tool_program", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    for name in LIBRARIES.get(folder.name.partition("-")[0], ()):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        line, _ = listening.accept()
        message, (output,), _, _ = socket.recv_fds(line, MESSAGE_BYTES, 1)
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.argv = [str(program), *json.loads(message)]
                module.main()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(output)
        ended = os.pidfd_open(child)
        if line in select.select([ended, line], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with line, contextlib.suppress(OSError):  # nobody waits for it any more
            line.send(str(status).encode())


if __name__ == "__main__":
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
