"""The real service for a test: `python -m box.up` in a folder of its own, driven over HTTP, watched through /proc."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support import forks, migrated, selftest
from worker import processes

ROOT = Path(__file__).resolve().parent.parent.parent

SHORT = {
    "EFT_LEASE_SECONDS": "30",  # nobody waits for one to end here; a busy machine must not lose it for a few seconds
    "EFT_RENEW_SECONDS": "1",
    "EFT_FENCE_SECONDS": "20",
    "EFT_RELAY_SECONDS": "0.2",
    "EFT_SWEEP_SECONDS": "1",
    "EFT_RETRY_BACKOFF_SECONDS": "0.2",
    "EFT_STOP_GRACE_SECONDS": "30",
    "EFT_MIN_FREE_BYTES": "1000000",
    "OMP_NUM_THREADS": "1",
    "EFT_RATE_PER_MINUTE": "0",  # tests look twenty times a second
    "EFT_SPARE": "0",  # a test that wants one says so: importing torch beside a test costs it seconds
}
"""Looks and waits of seconds, so that a test of what comes after them does not take minutes."""
RARELY = 0.3
"""Seconds between two looks over HTTP for something that takes many: a look is six milliseconds of processor time."""


class Service:
    """Everything below `folder`: data root, key, output of the supervisor. `cold`: started as a user starts it, and not
    as a fork of what has been imported (tests/support/forks.py)."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, *, cold: bool = False) -> None:
        self.cold = cold
        self.folder = folder
        self.data = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EFT_")},
            **SHORT,
            "EFT_DATA": str(self.data),
            "EFT_NODE": f"node-{folder.name}",
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | forks.Program | None = None
        self.key = ""
        self.client = httpx.Client()

    def start(self) -> Service:
        key_file = self.folder / "key"
        selftest.lay(self.data, self.environment["EFT_NODE"], inherited=self.environment)
        if not self.cold and "EFT_DATABASE_URL" not in self.environment:
            migrated.lay(self.data / "eft.db")
        with (self.folder / "up.log").open("ab") as log:
            start = forks.start_cold if self.cold else forks.start
            arguments = ["--port", "0", "--key-file", str(key_file)]
            self.process = start("box.up", *arguments, environment=self.environment, log=log.fileno())
        seen = self.log().count(" is up at ")
        wait_for(lambda: self.log().count(" is up at ") > seen or self.process.poll() is not None, 150, "up")
        assert self.process.poll() is None, self.log()
        self.key = key_file.read_text().strip()
        self.client = httpx.Client(
            base_url=self.note()["url"], headers={"Authorization": f"Bearer {self.key}"}, timeout=120, trust_env=False
        )
        return self

    def log(self) -> str:
        return (self.folder / "up.log").read_text()

    def note(self) -> dict[str, Any]:
        return json.loads((self.data / "up.json").read_text())

    def pid(self, name: str) -> int:
        return self.note()["pids"][name]

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 120) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(timeout)
        self.client.close()

    # -- over HTTP

    def upload(self, path: Path) -> str:
        reply = self.client.post("/files", files={"file": (path.name, path.read_bytes())})
        assert reply.status_code == 201, reply.text
        return reply.json()["id"]

    def submit(self, spec: Mapping[str, Any]) -> str:
        reply = self.client.post("/jobs", json=spec)
        assert reply.status_code == 201, reply.text
        return reply.json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        reply = self.client.get(f"/jobs/{job_id}")
        assert reply.status_code == 200, reply.text
        return reply.json()

    def statuses(self, job_id: str) -> list[str]:
        """The states the job has had, from its events."""
        reply = self.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000})
        assert reply.status_code == 200, reply.text
        return [event["data"]["to"] for event in reply.json()["data"] if event["type"] == "status"]

    def wait(self, job_id: str, *wanted: str, timeout: float = 200) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["status"] in wanted else None

        what = f"{job_id} to be {' or '.join(wanted)}"
        return wait_for(look, timeout, what, lambda: self.describe(job_id), every=RARELY)

    def wait_for_step(self, job_id: str, step: int, timeout: float = 200) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            assert job["status"] not in ("failed", "cancelled", "succeeded"), self.describe(job_id)
            return job if (job["progress"] or {}).get("step", 0) >= step else None

        return wait_for(look, timeout, f"step {step} of {job_id}", lambda: self.describe(job_id), every=0.1)

    def artifact(self, job_id: str, path: str) -> bytes:
        reply = self.client.get(f"/jobs/{job_id}/artifacts/{path}")
        assert reply.status_code == 200, reply.text
        return reply.content

    def describe(self, job_id: str) -> str:
        """For the message of a failed test."""
        logs = sorted((self.data / "runs" / job_id).glob("*/log.txt")) + sorted((self.data / "logs").glob("*.log"))
        tails = "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)
        return f"{json.dumps(self.job(job_id), indent=1)}\n{tails}\n{self.log()[-2000:]}"

    # -- through /proc

    def processes(self) -> dict[int, str]:
        """Living processes of this service, by their environment or command line, less this one."""
        found = {}
        marker = os.fsencode(self.data)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                ours = marker in command or b"EFT_DATA=" + marker in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # it has just ended
        return found

    def trainers(self, job_id: str = "") -> list[int]:
        """Trainer processes (of one job): each leads a session. What one has just forked is called as it is until
        it executes something else, and is no trainer."""
        sessions = set()
        for pid, command in self.processes().items():
            if f"-m core.train {self.data}/runs/{job_id}" in command:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    sessions.add(os.getsid(pid))
        return sorted(sessions)

    def spares(self) -> list[int]:
        """Children of the worker that have no run: a standby trainer, or a fork server."""
        found, worker = [], self.pid("worker")
        for child in processes.everyone():
            with contextlib.suppress(OSError):  # it has just ended
                command = Path(f"/proc/{child.pid}/cmdline").read_bytes()
                if child.parent == worker and child.alive and b"core.train.entry.standby" in command:
                    found.append(child.pid)
        return found


def wait_for(
    look: Callable[[], Any], timeout: float, what: str, describe: Callable[[], str] = str, every: float | None = None
) -> Any:
    """Return the first true answer of `look`, which is called every so many seconds: by default the more seldom, the
    longer it takes."""
    began = time.monotonic()
    while True:
        answer = look()
        if answer:
            return answer
        waited = time.monotonic() - began
        assert waited < timeout, f"waited {timeout:g} s for {what}\n{describe()}"
        time.sleep(every or min(0.2, max(0.05, waited / 20)))


def running(
    folder: Path, environment: Mapping[str, str] | None = None, settle: float = 15.0, *, cold: bool = False
) -> Iterator[Service]:
    """For a fixture: a service that is up, and of which nothing is left `settle` seconds after its stop."""
    service = Service(folder, environment, cold=cold)
    try:
        yield service.start()
    finally:
        service.stop()
        deadline = time.monotonic() + settle  # for what has been killed a moment ago
        while (left := service.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left running: {left}"
