"""Requests made of the OpenAPI document: `python -m bench.fuzz [--db sqlite postgresql] [--requests N] [--seed N]`.

schemathesis asks a real API process for everything that its document offers, with a good key: good requests, wrong ones
and sequences of them, each round with the next seed, until at least so many were asked. What must hold: no answer of
5xx, no status that the document does not have, and the process lives. Requests and statuses are counted from the API's
own log. The last line is one JSON object; the exit status is 1 where something did not hold.

507 is no defect but a full quota or disk, and 503 a database that does not answer: neither happens here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.auth import keys
from bench.report import finish, hardware
from bench.server import server
from box import broker
from core import HOME
from core.db import migrate
from core.db.engine import Database
from core.jobs.policies import nodes
from core.settings import Settings
from tests.support import postgres

ROUNDS = ("examples,fuzzing,stateful", "coverage")
"""Phases of schemathesis: chance and sequences; then each field of each route in turn, with good values and wrong ones.
(Coverage of the job's schema alone is tens of thousands of requests, so a round has a bound in time.)"""
CHECKS = "not_a_server_error,status_code_conformance"
_ASKED = re.compile(r" eft\.api \[[^\]]*\] (\w+) (\S+) (\d{3}) \d+ ms")
_FAILED = re.compile(r"^_{3,} ((?:GET|POST|PUT|PATCH|DELETE|HEAD|Stateful)[^_]*?) _{3,}$", re.MULTILINE)


@dataclass
class Fuzzed:
    """What one API process was asked, and what it answered."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    """Method and path of the answers of 5xx."""
    failures: list[str] = field(default_factory=list)
    """What schemathesis found."""
    output: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.server_errors and not self.failures

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "server_errors": len(self.server_errors),
            "failures": len(self.failures),
            "seconds": round(self.seconds, 1),
            "hardware": hardware(),
        }


def fuzz(folder: Path, url: str, *, requests: int, seed: int, examples: int, seconds: int, rounds: int = 100) -> Fuzzed:
    """Ask a new API over an empty database of this URL. Rounds of `examples` a route, and of at most `seconds`, until
    `requests` were asked."""
    database = Database(url)
    migrate.upgrade(database)
    keys.create(database, project="lab", user="ada", name="first")
    with database.write() as session:
        nodes.register(session, "box", "worker-fuzz", "0.1.0", [{"id": "cpu", "kind": "cpu"}], [])
    database.dispose()
    environment = {
        "EFT_DATA": str(folder / "data"),
        "EFT_DATABASE_URL": url,
        "EFT_RATE_PER_MINUTE": "0",
        "EFT_RATE_STRANGERS_PER_MINUTE": "0",
        "EFT_RATE_PUBLIC_PER_MINUTE": "0",
        "EFT_KEYS_PER_MEMBER": "10000",
        "EFT_MIN_FREE_BYTES": "0",
    }
    log, found, began = folder / "api.log", Fuzzed(), time.monotonic()
    with _broker(folder), server("api", environment, log) as api:
        for number in range(rounds):
            if found.requests >= requests and number >= len(ROUNDS):
                break
            phases = ROUNDS[number % len(ROUNDS)]
            before = found.requests
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://{api.address}/openapi.json"]
            command += ["--phases", phases, "--checks", CHECKS, "--seed", str(seed), "--max-examples", str(examples)]
            command += ["--workers", "1", "--max-time", str(seconds)]
            command += ["--continue-on-failure", "--no-shrink", "--no-color"]
            command += ["--warnings", "off", "--suppress-health-check", "all", "--generation-database", "none"]
            ended = subprocess.run(
                command,
                cwd=folder,
                env=os.environ
                | {
                    "SCHEMATHESIS_HOOKS": "bench.fuzz_hooks",
                    "PYTHONPATH": str(HOME),
                    "EFT_DATABASE_URL": url,
                    "EFT_DATA": str(folder / "data"),
                },
                capture_output=True,
                text=True,
                check=False,
            )
            found.output += ended.stdout + ended.stderr
            if ended.returncode != 0:
                found.failures += _FAILED.findall(ended.stdout) or [f"schemathesis ended with {ended.returncode}"]
            _count(log, found)
            if found.requests == before:
                raise SystemExit(f"schemathesis asked nothing:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")
            seed += 1
    found.seconds = time.monotonic() - began
    return found


@contextmanager
def _broker(folder: Path) -> Iterator[None]:
    """As `eft up` starts one: without it `/readyz` would rightly say 503."""
    settings = Settings(data=str(folder / "data"))
    broker.prepare(settings.root / "broker", settings.broker_socket)
    with (folder / "broker.log").open("ab") as output:
        process = subprocess.Popen(
            broker.command(settings.root / "broker", settings.broker_socket), stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _count(log: Path, found: Fuzzed) -> None:
    """Of the whole log: the probes of the start are left out."""
    asked = [match for match in _ASKED.findall(log.read_text(errors="replace")) if match[1] != "/healthz"]
    found.requests = len(asked)
    found.statuses = Counter(int(status) for _, _, status in asked)
    found.server_errors = [f"{method} {path}: {status}" for method, path, status in asked if status.startswith("5")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--db", nargs="+", default=["sqlite", "postgresql"], choices=["sqlite", "postgresql"])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=40, help="of a route in a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=240, help="longest time of a round")
    parser.add_argument("--rounds", type=int, default=100, help="at most so many, however few were asked")
    parser.add_argument("--keep", type=Path, help="write logs here")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    good = True
    for kind in given.db:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = f"sqlite:///{folder / 'eft.db'}"
            if kind == "postgresql":
                url = stack.enter_context(postgres.databases())()
            found = fuzz(
                folder,
                url,
                requests=given.requests,
                seed=given.seed,
                examples=given.examples,
                seconds=given.seconds,
                rounds=given.rounds,
            )
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{kind}.log").write_bytes((folder / "api.log").read_bytes())
                (given.keep / f"{kind}.txt").write_text(found.output)
        results[kind] = found.figures()
        good = good and found.good
        for line in [*found.server_errors[:20], *found.failures[:20]]:
            print(f"{kind}: {line}")
        print(f"{kind}: {json.dumps(results[kind])}", flush=True)
    finish(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
