"""`python -m tests.rehearsal.forking`: a process that has imported what a run imports, and has asked for no device. For
each line on stdin a fork of it becomes `python -m MODULE ARGUMENTS`; it answers with the fork's number, and then with
its exit code. A cold start is seconds of processor time: it is for test_hip.py and the gang of test_runs.py.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from core.base.forks import become_module
from core.base.process import die_with_parent
from tests.rehearsal.environment import variables
from tests.support.trainer import ENVIRONMENT, ROOT

PADDING = " " * 2048
"""Room for a command line."""


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """One for all tests of this process, with which it ends."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, PADDING],
        cwd=ROOT, env=variables(devices=2) | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


class ForkedProgram:
    """Such a fork; one at a time. `about`: settings of the runtime, as those of `variables`."""

    def __init__(self, module: str, *arguments: str, log: Path, **about: object) -> None:
        environment = {f"REHEARSAL_{name.upper()}": str(value) for name, value in about.items()}
        order = {"module": module, "arguments": arguments, "log": str(log), "environment": environment}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        self._answers = server.stdout
        server.stdin.write(json.dumps(order).encode() + b"\n")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    from core.train import __main__ as trainer
    from core.train.entry import standby

    with trainer.importing():
        standby.imports()
        gc.collect()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
                os.dup2(descriptor, number)
            os.environ |= order["environment"]
            become_module(order["module"], order["arguments"])
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
