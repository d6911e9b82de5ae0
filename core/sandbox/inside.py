"""The process inside: puts up the walls, says whether they stand, and runs one program after another.

`python -m core.sandbox.inside FD` over the socket FD. The first process separates itself and forks the first one of
the new process namespace, which serves: it forks a child for each program, so that no program finds anything that
another one left. When it ends, so does everything in its namespace; it ends when the other side of the socket does.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import secrets
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from core.sandbox import kernel, program, walls
from core.sandbox.frames import Closed, receive, send

OUTPUT, ERRORS, RESULT = 1, 2, 3
"""Descriptors of a program."""
RESULT_BYTES = 32 << 20
DROPPED_BYTES = 64 << 20
"""Output beyond what is kept that is read and dropped; a program that writes more is ended."""
CHUNK = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m core.sandbox.inside", description="Run programs; for the sandbox.")
    parser.add_argument("control", type=int, help="descriptor of the socket that the caller left open")
    control = socket.socket(fileno=parser.parse_args().control)
    limits = receive(control)
    try:
        if (why := kernel.supported()) is not None:
            raise walls.Wall(why)
        Path("/proc/self/oom_score_adj").write_text("1000")  # before anybody else, where memory is short
        user = walls.separate()
    except walls.Wall as wall:
        send(control, {"refused": str(wall)})
        return
    pid = os.fork()
    if pid:
        control.close()
        os.waitpid(pid, 0)
        return
    try:
        walls.enclose(user, limits["files_bytes"], limits["folders"])
        exec(compile(limits["prelude"], "<prelude>", "exec"), {"__name__": "prelude"})  # noqa: S102 - ours
    except (walls.Wall, ImportError, OSError) as wall:
        send(control, {"refused": str(wall)})
        os._exit(1)
    send(control, {"pid": os.getpid(), "root": user.root})
    gc.freeze()
    try:
        serve(control, limits)
    except Closed:
        os._exit(0)


def serve(control: socket.socket, limits: Mapping[str, Any]) -> None:
    """Answer each request, until the socket is closed."""
    number = 0
    while True:
        request = receive(control)
        number += 1
        folder = Path(walls.BOX) / str(number)
        folder.mkdir(mode=0o700)
        answer = attempt(control, request, folder, limits)
        answer["worn"] = not _removed(folder)
        send(control, answer)


def attempt(control: socket.socket, request: dict[str, Any], folder: Path, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Run one program to its end or its limit. Closed when nobody waits for it any more."""
    request["seal"] = secrets.token_hex(16)
    pipes = {name: os.pipe() for name in (OUTPUT, ERRORS, RESULT)}
    pid = os.fork()
    if pid == 0:
        _become(request, {name: ends[1] for name, ends in pipes.items()}, folder, limits)
    kept = {name: bytearray() for name in pipes}
    seen = dict.fromkeys(pipes, 0)
    most = {OUTPUT: limits["output_bytes"], ERRORS: limits["output_bytes"], RESULT: RESULT_BYTES}
    until = time.monotonic() + request["seconds"]
    ended: str | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            selector.register(reading, selectors.EVENT_READ, name)
        open_pipes = len(pipes)
        while open_pipes and ended is None:
            events = selector.select(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                ended = "time"
            for key, _ in events:
                if key.fileobj is control:
                    raise Closed
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(key.fd)
                    open_pipes -= 1
                    continue
                seen[key.data] += len(data)
                kept[key.data] += data[: max(0, most[key.data] - len(kept[key.data]))]
                if seen[key.data] > most[key.data] + (0 if key.data == RESULT else DROPPED_BYTES):
                    ended = "output"
    # A program may close its ends and go on: what it says from here on nobody hears.
    status, usage = _reaped(pid, until if ended is None else 0.0)
    for reading, _ in pipes.values():
        os.close(reading)
    if ended is None and (code := os.waitstatus_to_exitcode(status)) < 0:
        ended = "time" if -code in (signal.SIGXCPU, signal.SIGKILL) else f"signal {signal.Signals(-code).name}"
    return {
        "ended": ended,
        "seal": request["seal"],
        "result": kept[RESULT].decode(errors="replace"),
        "stdout": kept[OUTPUT].decode(errors="replace"),
        "stderr": kept[ERRORS].decode(errors="replace"),
        "cut": any(seen[name] > most[name] for name in (OUTPUT, ERRORS)),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def _reaped(pid: int, until: float) -> tuple[int, resource.struct_rusage]:
    """Wait for the program to end, and end it at its time."""
    while time.monotonic() < until:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status, usage


def _become(request: dict[str, Any], ends: Mapping[int, int], folder: Path, limits: Mapping[str, Any]) -> NoReturn:
    """This child becomes the program: nothing open but its own ends, all limits set, then the source."""
    code = 1
    try:
        high = {name: os.dup(end) for name, end in ends.items()}
        spared = {name: os.dup2(os.dup2(end, 100 + name), 100 + name) for name, end in high.items()}
        nothing = os.open("/dev/null", os.O_RDONLY)
        os.dup2(nothing, 0)
        for name, end in spared.items():
            os.dup2(end, name)
        os.closerange(RESULT + 1, 1 << 16)
        os.chdir(folder)
        os.environ.update(HOME=str(folder), TMPDIR=str(folder))
        _limit(limits, request["seconds"])
        kernel.landlock([*walls.readable(), *limits["folders"]], [str(folder)], list(walls.DEVICES))
        kernel.filter_system_calls()
        program.write(program.answer(request), RESULT)
        code = 0
    except BaseException as error:  # a wall that does not go up around this one program, which is not run then
        told = {"wall": f"{type(error).__name__}: {error}", "seal": request["seal"]}
        program.write(json.dumps(told).encode(), RESULT)
    finally:
        os._exit(code)


def _limit(limits: Mapping[str, Any], seconds: float) -> None:
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_NPROC: limits["threads"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_FSIZE: limits["files_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, value in bounds.items():
        resource.setrlimit(name, (value, value))


def _removed(folder: Path) -> bool:
    """Whether a program's folder is gone."""
    for place, folders, _ in os.walk(folder):
        for one in folders:
            if not (path := Path(place) / one).is_symlink():
                path.chmod(0o700)
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        return False
    return True


if __name__ == "__main__":
    main()
