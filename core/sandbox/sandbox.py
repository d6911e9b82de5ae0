"""A sandbox as its user sees it: started once, asked to run one program after another, closed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from core.errors import EftError
from core.sandbox.frames import Closed, receive, send

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 60.0
GRACE_SECONDS = 15.0
"""Beyond a program's own time, until the sandbox itself counts as lost."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All that a program finds in its environment, beside HOME and TMPDIR."""


class NoSandbox(EftError):
    """This machine cannot put up the walls."""

    code = "no_sandbox"
    status = 422


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Bounds on each program."""

    memory_bytes: int = 2 << 30
    """Address space."""
    files_bytes: int = 64 << 20
    """Files in its folder, which are in memory."""
    output_bytes: int = 64 << 10
    """Text kept of each of its two outputs."""
    threads: int = 32
    folders: tuple[str, ...] = ()
    """Folders of further packages, which programs can read."""
    prelude: str = ""
    """Source of ours that is run once; every program finds the modules that it imported."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    value: Any = None
    """What it returned."""
    error: str | None = None
    """Why there is no value: an exception with its place, or a limit."""
    stdout: str = ""
    stderr: str = ""
    ended: str | None = None
    """`time`, `output`, `memory` or `signal NAME` where it did not end by itself."""
    cpu_seconds: float = 0.0


class ProgramSandbox:
    """A context manager. Its programs see no network, no files but Python's, no process but themselves, no variable of
    this process's environment; and nothing of one another."""

    def __init__(self, limits: ProgramLimits | None = None) -> None:
        """Raises NoSandbox."""
        self.limits = limits or ProgramLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.starts = 0
        self._start()

    def run_function(
        self, source: str, function: str, arguments: Mapping[str, Any], *, seconds: float = 60.0
    ) -> Outcome:
        """Call a function that a source defines, by those arguments that it has parameters for."""
        return self._run({"kind": "function", "source": source, "function": function, "arguments": arguments}, seconds)

    def run_script(self, source: str, *, stdin: str = "", seconds: float = 10.0) -> Outcome:
        """Run a source from top to bottom. `value`: whether it reached its end, rather than SystemExit."""
        return self._run({"kind": "script", "source": source, "stdin": stdin}, seconds)

    def _run(self, request: dict[str, Any], seconds: float) -> Outcome:
        if self._process is None or self._process.poll() is not None:
            self._start()
        control = self._control
        assert control is not None
        control.settimeout(seconds + GRACE_SECONDS)
        try:
            send(control, request | {"seconds": seconds})
            answer = receive(control)
        except (Closed, TimeoutError):
            self.close()
            return Outcome(error="the sandbox itself ended, most likely for want of memory", ended="memory")
        if answer["worn"]:
            self.close()
        return _outcome(answer, seconds)

    def _start(self) -> None:
        own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-m", "core.sandbox.inside", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=ENVIRONMENT,
                start_new_session=True,
            )
        self._control = own
        self.starts += 1
        own.settimeout(START_SECONDS)
        try:
            send(own, asdict(self.limits))
            told = receive(own)
        except (Closed, TimeoutError) as error:
            self.close()
            raise NoSandbox("the sandbox for code of users does not start; its log says why") from error
        if "refused" in told:
            self.close()
            raise NoSandbox(f"code of users cannot be run safely on this machine: {told['refused']}")

    def close(self) -> None:
        """End every process of it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._control = None

    def __enter__(self) -> ProgramSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def why_not() -> str | None:
    """Why this machine has no sandbox; None where it has one, which was tried."""
    try:
        with ProgramSandbox(ProgramLimits(memory_bytes=512 << 20, files_bytes=1 << 20)) as sandbox:
            outcome = sandbox.run_script("assert True", seconds=20)
    except NoSandbox as error:
        return error.message
    return outcome.error


def _outcome(answer: Mapping[str, Any], seconds: float) -> Outcome:
    """What the process inside said, of which the program wrote `result`: anything at all."""
    shown = {name: answer[name] for name in ("stdout", "stderr", "cpu_seconds")}
    match answer["ended"]:
        case "time":
            return Outcome(error=f"not done after {seconds:g} s", ended="time", **shown)
        case "output":
            return Outcome(error="it wrote too much output", ended="output", **shown)
        case str() as signalled:
            return Outcome(error=f"it was ended by {signalled}", ended=signalled, **shown)
        case _:
            pass
    try:
        result = json.loads(answer["result"])
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or result.get("seal") != answer["seal"]:
        return Outcome(error="it ended its own process", **shown)
    if "wall" in result:
        raise NoSandbox(f"code of users cannot be run safely on this machine: {result['wall']}")
    if (error := result.get("error")) is None:
        return Outcome(value=result.get("value"), **shown)
    kind, message, trace = (str(error.get(name)) for name in ("type", "message", "traceback"))
    ended = "memory" if kind == "MemoryError" else None
    return Outcome(error=f"{kind}: {message}\n{trace}".rstrip(), ended=ended, **shown)
