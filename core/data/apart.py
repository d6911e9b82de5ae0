"""Files checked in processes of their own, each with bounds on its processor time and memory.

What comes up is read by parsers, and some of it takes them long, or much memory, or holds Python's lock while others
wait. So the one who takes uploads has each checked by a process that is forked for it from one that has imported all
that is needed: `python -m core.data.apart FD`. Over the socket FD come sockets, one for each file; over such a socket
come frames. Each is answered by one, so that either side holds one frame at most.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import resource
import signal
import socket
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from core.data.check import FileCheck, FileReport
from core.data.faults import MAX_FAULTS
from core.errors import Fault

Kind = Literal[b"B", b"D", b"F"]
"""Begin (format and columns, as JSON), data, finish (where the file lies, as JSON)."""

CPU_SECONDS = 30
CPU_SECONDS_A_MIB = 10
"""Processor time that the check of a file may take: so much, and so much more for each MiB. The slowest good files take
a tenth of it."""
MAX_BYTES = 2 << 30
"""Memory of one check. Files are read in pieces: a row has 16 MiB at most, a page of Parquet 256 MiB."""
NICE = 5
"""Behind whoever answers requests."""
_HEAD = struct.Struct("<cI")


class Ended(Exception):
    """The process of a check is gone, or has reached a bound."""


# --- frames --------------------------------------------------------------------------------------------


def send(to: socket.socket, kind: bytes, data: bytes) -> None:
    """Raises Ended."""
    try:
        to.sendall(_HEAD.pack(kind, len(data)))
        to.sendall(data)
    except OSError as error:
        raise Ended from error


def receive(source: socket.socket) -> tuple[bytes, bytes]:
    """Raises Ended."""
    kind, size = _HEAD.unpack(_exactly(source, _HEAD.size))
    return kind, _exactly(source, size)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = source.recv_into(view)
        except OSError as error:
            raise Ended from error
        if count == 0:
            raise Ended
        view = view[count:]
    return bytes(data)


def report_of(data: bytes) -> FileReport | None:
    """What an answer says; None: go on. Raises Ended where a bound was reached, RuntimeError for a defect."""
    answer: dict[str, Any] = json.loads(data)
    if "defect" in answer:
        raise RuntimeError(f"the check of a file failed: {answer['defect']}")
    if answer.get("memory"):
        raise Ended
    if (told := answer.get("report")) is None:
        return None
    faults, notices = (tuple(Fault(**one) for one in told.pop(name)) for name in ("faults", "notices"))
    told["ignored_columns"] = tuple(told["ignored_columns"])
    return FileReport(**told, faults=faults, notices=notices)


# --- the process of one file ---------------------------------------------------------------------------


def serve(own: socket.socket) -> None:
    """Check one file, until its socket is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    os.nice(NICE)
    # What it is ended by: a number could be another process's by then.
    pidfd = os.pidfd_open(os.getpid())
    own.sendmsg([b"p"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
    os.close(pidfd)
    check, fed = FileCheck(), 0
    _allow(fed)
    while True:
        try:
            kind, data = receive(own)
        except Ended:
            return
        answer: dict[str, Any] = {}
        try:
            match kind:
                case b"B":
                    check = FileCheck(**json.loads(data), most_faults=MAX_FAULTS)
                case b"D":
                    fed += len(data)
                    _allow(fed)
                    check.feed(data)
                    if check.fault_count > MAX_FAULTS:
                        answer["report"] = asdict(check.report())
                case _:
                    path = json.loads(data)
                    answer["report"] = asdict(check.finish(None if path is None else Path(path)))
        except MemoryError:
            answer = {"memory": True}
        except Exception as error:
            answer = {"defect": f"{type(error).__name__}: {error}"[:2000]}
        send(own, kind, json.dumps(answer).encode())


def _allow(fed: int) -> None:
    """Processor time for what has come so far. Beyond it the kernel ends the process."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = CPU_SECONDS + CPU_SECONDS_A_MIB * fed // (1 << 20)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


# --- the process they are forked from ------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m core.data.apart", description=__doc__)
    parser.add_argument("control", type=int, help="descriptor of the socket over which the files' sockets come")
    control = socket.socket(fileno=parser.parse_args().control)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                code = 1
                try:
                    serve(socket.socket(fileno=descriptor))
                    code = 0
                finally:
                    os._exit(code)
            os.close(descriptor)


if __name__ == "__main__":
    main()
