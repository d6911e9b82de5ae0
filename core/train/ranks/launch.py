"""The launcher of a run with several ranks: what the worker sees as its one child. It imports no torch, and starts each
rank as a process of its own; where it was itself forked with all that a rank imports, it forks the ranks.

It holds the lifeline (heartbeat, SIGTERM, SIGUSR1) for all ranks, starts them as torchrun would with max_restarts 0,
and waits. Heartbeats it hands on: each rank ends itself when none comes, also while this process is stopped. The first
rank that does not end well ends the attempt: all others are killed at once, since they wait in a sum that can never be
complete, and the error reported is that of the first. The launcher then ends as it did, by the same exit code or
by the same signal, so that a worker needs to know nothing of ranks.

torchrun itself is not that launcher, for what its 2.13 does: it puts each rank into a session of its own, beyond the
reach of a worker that has to see to the end of everything it started; survivors of a death get SIGTERM and 30 s, in
which a rank of ours would write a checkpoint without its peers; the first death is the first that is polled; its exit
status is 1 whatever the ranks' were; and its store listens on every interface. The ranks run under it all the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Protocol

from core import HOME
from core.base.clock import boottime
from core.base.forks import Forked, run_module
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_NO_SPACE, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, RANKS
from core.spec.run.heartbeat import heartbeat
from core.spec.run.orders import RunOrder
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.entry.fencing import STDIN, arm, leave
from core.train.ranks import env
from core.train.ranks.env import LastWord

LEAVE_SECONDS = 2.0
"""For the others, once one rank has left with its checkpoint: there is nothing left for them to write."""
END_SECONDS = 60.0
"""For the others, once one has ended well and the rest should be about to."""
DUMP_SECONDS = 0.15
"""For one rank to write its stacks, before the next does, so that they do not mix."""
MODULE = "core.train.ranks"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"} if sys.platform == "linux" else {}
"""Gangs are of one node: what gloo and NCCL (RCCL) open, on ports of the kernel's choice, is for this machine alone."""


def launch(run_dir: Path, order: RunOrder, module: str = MODULE, stream: int | None = None) -> int:
    """Run the order's ranks to their end: the exit code (core/spec/run/exit_codes.py). Does not return where a rank was
    ended by a signal: this process is ended by the same one then. `module`: that of a rank. `stream`: number of a
    socket that is rank 0's."""
    held_at = boottime() if order.held_at is None else order.held_at
    gang = RankProcesses(run_dir, order.world_size, order.fence_seconds, held_at, module, stream)
    hooks: dict[str, Any] = {"on_stop": gang.ask, "on_fence": gang.kill, "on_beat": gang.beat}
    forked = gang.can_fork()
    try:
        if forked:
            gang.start()  # while this process has no thread that listens for heartbeats
        stop = arm(order.fence_seconds, held_at=order.held_at, first_to_go=False, **hooks)

        def interrupted(signum: int, frame: FrameType | None) -> None:
            """Ctrl-C by hand is SIGTERM; the second one interrupts."""
            if stop.requested:
                raise KeyboardInterrupt
            stop.requested = True
            gang.ask()

        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *_: gang.dump())
        signal.signal(signal.SIGINT, interrupted)
        if not forked:
            gang.start()
        if stop.requested:
            gang.ask()  # it came while they were being started
        end = gang.wait()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be interrupted
        gang.kill()
        gang.reap()
        shutil.rmtree(gang.folder, ignore_errors=True)
    return _tell(end, gang.world, run_dir, asked=stop.requested)


@dataclass(frozen=True, slots=True)
class End:
    """How the attempt ended: the code of the rank that decided it (-N: signal N)."""

    rank: int
    code: int
    word: LastWord | None = None


class RankProcess(Protocol):
    """What a launcher needs of subprocess.Popen."""

    pid: int
    stdin: IO[bytes] | None
    """The pipe for heartbeats, which does not block; None: there is no lease."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass(slots=True)
class RankProcesses:
    """The processes of all ranks, in this process's session. Signals may be sent from handlers and other threads."""

    run_dir: Path
    world: int
    fence_seconds: float | None
    held_at: float
    """When the lease was last held, as far as this process knows, in seconds of CLOCK_BOOTTIME."""
    module: str = MODULE
    """Module of a rank."""
    stream: int | None = None
    """Number of a socket that rank 0 inherits; this process closes its own end of it."""
    folder: Path = field(init=False)
    ranks: list[RankProcess] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that have ended."""
    _woken: int = field(init=False)
    """Readable after a signal. One that comes just before this process begins to wait would interrupt nothing, and its
    handler, which is Python, would run when a rank ends at last (signal.set_wakeup_fd)."""
    _wake: int = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.run_dir / f"{RANKS}{secrets.token_hex(8)}"
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def can_fork(self) -> bool:
        """Whether this process has what ranks import, and no thread that would be missing in them. Fork servers exist
        where nothing computes on a GPU, whose driver would not survive a fork (core/train/entry/standby.py)."""
        return "core.train.recipe" in sys.modules and threading.active_count() == 1

    def start(self) -> None:
        self.folder.mkdir(mode=0o700)
        begin = self._forked if self.can_fork() else self._spawned
        for rank in range(self.world):
            process = begin(rank)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
            self.ranks.append(process)
        if self.stream is not None:
            os.close(self.stream)
        self.beat(self.held_at)  # which may be later than what the first of them was started with

    def _spawned(self, rank: int) -> RankProcess:
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *self._arguments(rank)],
            pass_fds=[] if rank or self.stream is None else [self.stream],
            stdin=subprocess.DEVNULL if self.fence_seconds is None else subprocess.PIPE,
            cwd=HOME,
            env=self._environment(rank),
            bufsize=0,
        )

    def _forked(self, rank: int) -> RankProcess:
        environment = self._environment(rank)  # which names this process as the launcher
        if self.fence_seconds is None:
            reader, writer = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), None
        else:
            reader, end = os.pipe()
            writer = os.fdopen(end, "wb", buffering=0)
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            self._become_rank(rank, environment, reader, writer)
        os.close(reader)
        return Forked(pid, writer)

    def _arguments(self, rank: int) -> list[str]:
        return [str(self.run_dir), *([] if rank or self.stream is None else [str(self.stream)])]

    def _become_rank(self, rank: int, environment: dict[str, str], stdin: int, writer: IO[bytes] | None) -> NoReturn:
        """In the fork: what a process started for the rank would have, and nothing of its launcher's."""
        try:
            signal.set_wakeup_fd(-1)
            os.dup2(stdin, STDIN)
            for pipe in (writer, *(one.stdin for one in self.ranks)):
                if pipe is not None:
                    pipe.close()
            theirs = [] if self.stream is None or not rank else [self.stream]
            for descriptor in (stdin, self._woken, self._wake, *theirs):
                os.close(descriptor)
            os.chdir(HOME)
            os.environ.clear()
            os.environ.update(environment)
            leave(run_module(self.module, self._arguments(rank)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(EXIT_FAILED)  # nothing of the launcher runs on in it

    def _environment(self, rank: int) -> dict[str, str]:
        share = max(1, len(os.sched_getaffinity(0)) // self.world)
        return (
            {"OMP_NUM_THREADS": str(share)}  # a worker has set it
            | LOOPBACK
            | os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                env.FOLDER: str(self.folder),
                env.LAUNCHER: str(os.getpid()),
            }
            | ({} if self.fence_seconds is None else {env.FENCE: f"{self.fence_seconds} {self.held_at}"})
        )

    def beat(self, held_at: float) -> None:
        """A heartbeat for each, from the fence's thread. A pipe that is full is that of a rank that is stopped."""
        self.held_at = held_at
        for process in list(self.ranks):
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it has ended; `wait` sees that
                    process.stdin.write(heartbeat(held_at))

    # -- signals

    def ask(self) -> None:
        """SIGTERM to each: they agree on where to leave."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def dump(self) -> None:
        """The stacks of every rank into the log, one after another."""
        for rank, process in enumerate(self.ranks):
            if process.returncode is None:
                os.write(2, f"--- rank {rank} of {self.world} (process {process.pid})\n".encode())
                _signal(process, signal.SIGUSR1)
                time.sleep(DUMP_SECONDS)

    def _send(self, number: signal.Signals) -> None:
        for process in self.ranks:
            if process.returncode is None:
                _signal(process, number)

    # -- their end

    def wait(self) -> End:
        """Until it is decided how the attempt ends. Ranks may live on; `kill` and `reap` them."""
        deadline: float | None = None
        left = False
        while len(self.codes) < self.world:
            ended = self._next(deadline)
            bad = [End(rank, code, env.last_word(self.folder, rank)) for rank, code in ended.items() if code]
            if fatal := [end for end in bad if end.code != EXIT_CHECKPOINTED]:
                # Several deaths at once are compared: a rank that only lost a peer was not the first.
                return min(fatal, key=_blame)
            if bad and not left:
                left, deadline = True, time.monotonic() + LEAVE_SECONDS
            elif ended and not left and deadline is None and 0 in self.codes:
                deadline = time.monotonic() + END_SECONDS
            if not ended:
                break  # the deadline
        rank = 0 if not left else next(rank for rank, code in self.codes.items() if code == EXIT_CHECKPOINTED)
        return End(rank, self.codes[rank])

    def _next(self, deadline: float | None) -> dict[int, int]:
        """The ranks that have ended since the last call, with their codes; waits for one. Empty at the deadline."""
        living = [rank for rank in range(self.world) if rank not in self.codes]
        poll, exits = select.poll(), [os.pidfd_open(self.ranks[rank].pid) for rank in living]
        for descriptor in [self._woken, *exits]:
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = [descriptor for descriptor, _ in poll.poll(None if left is None else left * 1000)]
                if self._woken in ready:
                    os.read(self._woken, 4096)  # the handlers have run by now
                found = {rank: code for rank in living if (code := self.ranks[rank].poll()) is not None}
                if found or left == 0.0:
                    self.codes |= found
                    return found
        finally:
            for descriptor in exits:
                os.close(descriptor)

    def reap(self) -> None:
        """Wait for all. One that hangs in a driver cannot be killed: its GPU is not free, and the worker waits too."""
        for rank, process in enumerate(self.ranks):
            self.codes[rank] = process.wait()


def _signal(process: RankProcess, number: signal.Signals) -> None:
    """Not Popen.send_signal, which reaps: `_next` alone does, so that what it waits for keeps its number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _blame(end: End) -> tuple[int, float]:
    """Sorts ends by how likely they were the first."""
    if end.word is not None:
        return (2 if end.word.lost_peer else 1), end.word.at
    # NCCL's watchdog aborts a rank whose peer is gone.
    return (2 if end.code == -signal.SIGABRT else 0), 0.0


def _tell(end: End, world: int, run_dir: Path, *, asked: bool) -> int:
    """Report what the ranks left, once all of them are gone, and end as the first of them did."""
    if asked and end.code == -signal.SIGTERM:
        return EXIT_CHECKPOINTED  # before it could listen: nothing was done yet
    who = f"rank {end.rank} of {world}"
    if end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in set(signal.Signals) else f"signal {-end.code}"
        _write(run_dir, "notice", code="rank_died", message=f"{who} was ended by {name}, and the others with it")
        _die_by(-end.code)
    if end.code in (EXIT_OK, EXIT_CHECKPOINTED):
        return end.code
    if end.word is not None:
        payload = end.word.payload
        if end.rank:
            payload = payload | {"message": f"{payload['message']} ({who})"}
        if not _write(run_dir, "error", **payload):
            return EXIT_NO_SPACE if end.code == EXIT_NO_SPACE else EXIT_FAILED
    return end.code


def _write(run_dir: Path, type: Any, **payload: Any) -> bool:
    """Write an event once all ranks are gone. False when the disk refused it; the exit code then has to do."""
    try:
        events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
        try:
            events.write(type, **payload)
        finally:
            events.close()
    except OSError as error:
        print(f"{type} {payload} could not be written: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _die_by(number: int) -> None:
    """End this process by the signal that ended a rank, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(10.0)  # a signal whose default is to be ignored
