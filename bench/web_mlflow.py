"""The peer of bench/web.py: MLflow's own server and page, in an environment of its own, over the same curves."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from tests.support.ports import held_port

VERSION = "3.17.2"
RUNS = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.create_experiment("bench")
made = [client.create_run(experiment, run_name=f"run {n}").info.run_id for n in range(int(sys.argv[2]))]
print(json.dumps([experiment, made]))
"""
FAST = "PRAGMA cache_size = -400000; PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;"
"""For a database that is filled before anybody opens it."""
SHOWN_RUNS = 10
"""Runs whose lines its page draws, the first ones; one that has more asks for them by hand."""
DRAWN = """const charts = [...document.querySelectorAll('.js-plotly-plot')];
return charts.length > 3 && charts.every((one) => one.querySelectorAll('.scatterlayer .trace').length >= %d)"""
SHOWN = """return ['.js-plotly-plot', '.js-plotly-plot .scatterlayer .trace']
  .map((one) => document.querySelectorAll(one).length)"""
"""Charts and lines that are in its page: it makes those that are scrolled to."""


def environment(folder: Path) -> Path:
    """Python of an environment with MLflow; made on first use, and kept in `folder`."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mlflow").exists():
        print(f"installing MLflow {VERSION} into {folder} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", f"mlflow=={VERSION}"]
        subprocess.run(install, check=True)
    return python


class Peer:
    """A server of MLflow over a database below `folder`."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.database = folder / "mlflow.db"
        self.folder = folder
        self.experiment = ""
        self.address = ""
        self.pid = 0

    def fill(self, runs: int, curves: Iterable[tuple[int, str, int, float, float]]) -> None:
        """Curves: number of the run, name, step, value, time in seconds. They are written to the tables directly, in
        the form in which its store writes them."""
        command = [str(self.python), "-c", RUNS, self.uri, str(runs)]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        self.experiment, ids = json.loads(made.stdout.splitlines()[-1])
        last: dict[tuple[int, str], tuple[float, float, int]] = {}

        def rows() -> Iterator[tuple[str, float, int, str, int, int]]:
            for run, name, step, value, moment in curves:
                last[run, name] = (value, moment, step)
                yield name, value, int(moment * 1000), ids[run], step, 0

        with closing(sqlite3.connect(self.database, timeout=60)) as connection, connection:
            connection.executescript(FAST)
            told = '"key", value, timestamp, run_uuid, step, is_nan'
            connection.executemany(f"INSERT INTO metrics ({told}) VALUES (?, ?, ?, ?, ?, ?)", rows())  # noqa: S608
            connection.executemany(
                f"INSERT INTO latest_metrics ({told}) VALUES (?, ?, ?, ?, ?, 0)",  # noqa: S608
                (
                    (name, value, int(moment * 1000), ids[run], step)
                    for (run, name), (value, moment, step) in last.items()
                ),
            )
            connection.execute("UPDATE runs SET status = 'FINISHED', end_time = start_time + 1000")

    @contextmanager
    def serve(self) -> Iterator[Peer]:
        with held_port() as port, (self.folder / "mlflow.log").open("ab") as log:
            command = [str(self.python), "-m", "mlflow", "server", "--backend-store-uri", self.uri, "--workers", "1"]
            command += [
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--default-artifact-root",
                str(self.folder / "artifacts"),
            ]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.address, self.pid = f"127.0.0.1:{port}", process.pid
        try:
            end = time.monotonic() + 180
            while not self._answers():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"MLflow did not start:\n{(self.folder / 'mlflow.log').read_text()[-3000:]}")
                time.sleep(0.5)
            yield self
        finally:
            process.terminate()
            process.wait(30)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def page(self) -> str:
        """Address of the curves of all runs."""
        return f"http://{self.address}/#/experiments/{self.experiment}/runs?compareRunsMode=CHART"
