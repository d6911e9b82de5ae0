"""What followers of one job cost: `python -m bench.watchers [--watchers N] [--runs N] [--seconds S] [--db URL]`.

A trainer-like process does steps of fixed work (hashing) and writes its events as a trainer does, a metrics line each
step and a notice every tenth of a second; this process moves them to the database once a second, as a worker does; a
third one holds the event streams open. With watchers against without, in turn: steps per second of the writer, the
median time of one of its writes, and the API's processor time. Without a spare core the streams' reader costs the
writer time as well: its own processor time is printed.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.api import _json, our_server
from bench.report import compare, finish, hardware, show
from bench.server import Server, cpu_seconds
from core import HOME
from core.db.engine import Database
from core.jobs.base.transitions import Token
from core.jobs.lifecycle import relay
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded
from core.jobs.lifecycle.finish import finish as end
from core.train.base.events import EventWriter


def write_events(path: Path, seconds: float) -> None:
    """The trainer-like process. Prints steps per second and the median seconds of a write."""
    events, work = EventWriter(path), bytes(4 << 20)
    took, steps, notice = [], 0, 0.0
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        sha256(work).digest()
        steps += 1
        before = time.perf_counter()
        events.write("metrics", step=steps, values={"loss": 1.0 / steps, "learning_rate": 1e-4})
        took.append(time.perf_counter() - before)
        if now - notice >= 0.1:
            notice = now
            events.write("notice", code="bench", message="x" * 80)
    print(json.dumps({"steps": steps / (time.perf_counter() - began), "write": statistics.median(took)}))


def watch(port: int, path: str, key: str, count: int) -> None:
    """Hold `count` streams open until stdin ends; prints `open` when all have begun, then the bytes of each."""
    selector = selectors.DefaultSelector()
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nAccept: text/event-stream\r\n\r\n".encode()
    read = dict.fromkeys(range(count), 0)
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, number)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    told = False
    while True:
        for ready, _ in selector.select(1.0):
            if ready.data is None:
                values = sorted(read.values())
                print(json.dumps({"least": values[0], "most": values[-1], "cpu": time.process_time()}), flush=True)
                return
            part = ready.fileobj.recv(65536)  # type: ignore[union-attr]
            if not part:
                raise SystemExit(f"stream {ready.data} was closed")
            read[ready.data] += len(part)
        if not told and all(read.values()):
            print("open", flush=True)
            told = True


class Bench:
    """A job that runs, as far as the API can tell."""

    def __init__(self, api: Server, headers: dict[str, str], file_id: str, database: Database, folder: Path) -> None:
        self.api, self.headers, self.database, self.folder = api, headers, database, folder
        body = json.dumps({"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": file_id}).encode()
        self.job_id = str(_json(api, "POST", "/jobs", body, headers)["id"])
        self.token = self._claim("prepare")
        with database.write() as session:
            end(session, self.token, "prepare", Succeeded({"model_dir": "/m"}), 0, RetryPolicy())
        self.token = self._claim("cpu")
        self.offset = 0

    def _claim(self, kind: Any) -> Token:
        with self.database.write() as session:
            found = claim(session, "worker-1", "node-1", Slot(f"{kind}-0", kind), 86400)
            if found is None or found.token.job_id != self.job_id:
                raise SystemExit("the job could not be claimed")
            if kind == "cpu":
                running(session, found.token)
            return found.token

    def run(self, watchers: int, seconds: float) -> dict[str, float]:
        with ExitStack() as stack:
            reader = stack.enter_context(self._watchers(watchers)) if watchers else None
            if reader is not None and (reader.stdout is None or reader.stdout.readline() != b"open\n"):
                raise SystemExit("the streams did not begin")
            before = cpu_seconds(self.api.pid)
            path = self.folder / "events.jsonl"
            command = [sys.executable, "-m", "bench.watchers", "--write", str(path), "--seconds", str(seconds)]
            writer = stack.enter_context(subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE))
            while writer.poll() is None:
                time.sleep(1.0)
                self._relay(path)
            api = 100 * (cpu_seconds(self.api.pid) - before) / seconds
            assert writer.stdout is not None
            figures = {"api_cpu_percent": api, **json.loads(writer.stdout.read())}
            if reader is not None:
                assert reader.stdin is not None and reader.stdout is not None
                time.sleep(1.5)  # one poll of the hub
                reader.stdin.close()
                told = json.loads(reader.stdout.readline())
                if told["least"] != told["most"]:
                    raise SystemExit(f"not every watcher heard the same: {told}")
                figures |= {"bytes_each": told["least"], "reader_cpu_percent": 100 * told["cpu"] / seconds}
            return figures

    def _watchers(self, count: int) -> subprocess.Popen[bytes]:
        path = f"/jobs/{self.job_id}/events"
        command = [sys.executable, "-m", "bench.watchers", "--watch", str(self.api.port), path]
        key = self.headers["Authorization"]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, key, str(count)], cwd=HOME, stdin=pipe, stdout=pipe)

    def _relay(self, path: Path) -> None:
        while (batch := relay.read_batch(path, self.offset)).lines:
            with self.database.write() as session:
                if not relay.relay(session, self.token, batch):
                    raise SystemExit("the lease was lost")
            self.offset = batch.end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--watchers", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--db", help="SQLAlchemy URL of an empty database (default: SQLite)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write_events(options.write, options.seconds)
    elif options.watch is not None:
        port, path, key, count = options.watch
        watch(int(port), path, key, int(count))
    else:
        compare_with_none(options)


def compare_with_none(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="eft-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        url = options.db or f"sqlite:///{folder / 'eft.db'}"
        api, headers, file_id = our_server(url, folder, stack)
        bench = Bench(api, headers, file_id, Database(url), folder)
        with_them: list[dict[str, float]] = []
        without: list[dict[str, float]] = []
        for run in range(options.runs):
            for watchers in (options.watchers, 0) if run % 2 == 0 else (0, options.watchers):
                (with_them if watchers else without).append(bench.run(watchers, options.seconds))
        bench.database.dispose()
    results: dict[str, dict[str, Any]] = {}
    for figure, unit in (("steps", "steps/s"), ("write", "s")):
        key = f"writer_{figure}_with_{options.watchers}_watchers_against_none"
        results[key] = compare([run[figure] for run in with_them], [run[figure] for run in without])
        show(key, results[key], unit)
    for figure in ("api_cpu_percent", "reader_cpu_percent", "bytes_each"):
        mine = statistics.median(run[figure] for run in with_them)
        none = statistics.median(run[figure] for run in without) if figure in without[0] else None
        print(f"{figure}: {mine:.1f} with {options.watchers} watchers, {none} without")
        alone = {"peer": none, "ratio": None, "runs": options.runs, "hardware": hardware()}
        results[f"{figure}_{options.watchers}_watchers"] = {"ours": mine} | alone
    finish(results)


if __name__ == "__main__":
    main()
