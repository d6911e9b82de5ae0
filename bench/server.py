"""Server processes for benches, and clients that cost little beside them."""

from __future__ import annotations

import http.client
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core import HOME

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def server(module: str, environment: Mapping[str, str], log: Path) -> Iterator[Server]:
    """`python -m module` with EFT_PORT set to a free port, once it answers /healthz; stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=HOME,
            env=clean | dict(environment) | {"EFT_PORT": str(port)},
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 150
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{module} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What some clients met that asked as fast as they were answered."""

    per_second: float
    p50: float
    """Seconds."""
    p99: float


def load(target: Server, clients: int, seconds: float, request: Callable[[], tuple[str, str, bytes, dict]]) -> Load:
    """`request` gives (method, path, body, headers). Every client keeps one connection. Any reply but 2xx is an end."""
    took: list[list[float]] = [[] for _ in range(clients)]
    bad: list[str] = []
    end = time.perf_counter() + seconds

    def ask(mine: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
        while (began := time.perf_counter()) < end and not bad:
            method, path, body, headers = request()
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            text = reply.read()
            if not 200 <= reply.status < 300:
                bad.append(f"{reply.status} {text[:500]!r}")
            mine.append(time.perf_counter() - began)
        connection.close()

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in took]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if bad:
        raise SystemExit(f"{target.address} answered {bad[0]}")
    every = sorted(value for mine in took for value in mine)
    per_second = len(every) / (time.perf_counter() - began)
    return Load(per_second, statistics.median(every), every[min(len(every) - 1, int(len(every) * 0.99))])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mib(pid: int) -> float:
    """Proportional set size: pages shared with others count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no Pss of process {pid}")
