"""Processes of the box: each in a session of its own, with a log file, and gone when the supervisor is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from box.fork_server import MemberForkServer
from core.base.forks import Forked
from core.base.process import die_with_parent


def die_with(parent: int) -> Callable[[], None]:
    """For Popen's preexec_fn, in a process without other threads: SIGTERM when `parent` ends, however it ends."""

    def prepare() -> None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


@dataclass(slots=True)
class ManagedProcess:
    """One process that is kept running. Attributes below the line belong to the supervisor."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    log: Path
    inherit: tuple[int, ...] = ()
    """Descriptors it keeps open: a lock lasts as long as any process holds one."""

    forks: MemberForkServer | None = None
    """What forks it, where its command is `python -m MODULE` and that is there."""

    process: subprocess.Popen[bytes] | Forked | None = None
    began: float = 0.0
    failures: int = 0
    """Ends soon after a start, in a row."""
    next_start: float = 0.0
    _log: int = field(default=-1)

    def start(self) -> None:
        self._log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.process = self._fork() or subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=self.cwd,
                env=dict(self.environment),
                start_new_session=True,  # Ctrl+C reaches the supervisor alone, which stops the rest in order
                preexec_fn=die_with(os.getpid()),
                pass_fds=self.inherit,
            )
        finally:
            os.close(self._log)
        self.began = time.monotonic()

    def _fork(self) -> Forked | None:
        if self.forks is None:
            return None
        module, *arguments = self.command[2:]
        return self.forks.fork(module, arguments, self.environment, self._log, self.inherit)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def tail(self, lines: int = 8) -> str:
        """The end of its log, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
