"""The peer of bench/web.py: MLflow's own server and page, in an environment of its own, over the same curves."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from bench.web_data import Wanted, curve
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

    def fill(self, wanted: Wanted) -> None:
        """Rows are written to the tables directly, in the form in which its store writes them and in the order of their
        primary key; the other indices are made afterwards."""
        command = [str(self.python), "-c", RUNS, self.uri, str(wanted.runs)]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        self.experiment, ids = json.loads(made.stdout.splitlines()[-1])
        told = '"key", value, timestamp, run_uuid, step, is_nan'
        of_table = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'metrics' AND sql NOTNULL"
        with closing(sqlite3.connect(self.database, timeout=60, isolation_level=None)) as connection:
            connection.executescript(FAST)
            indices = connection.execute(of_table).fetchall()
            for name, _ in indices:
                connection.execute(f"DROP INDEX {name}")
            for name in sorted(wanted.names):
                curves = [curve(run, name, wanted.steps) for run in range(wanted.runs)]
                rows = (
                    (name, value, step * 1000, ids[run], step, 0)
                    for step, values in enumerate(zip(*curves, strict=True), 1)
                    for run, value in enumerate(values)
                )
                last = [
                    (name, one[-1], wanted.steps * 1000, ids[run], wanted.steps, 0) for run, one in enumerate(curves)
                ]
                connection.execute("BEGIN")
                for table, what in (("metrics", rows), ("latest_metrics", last)):
                    connection.executemany(f"INSERT INTO {table} ({told}) VALUES (?, ?, ?, ?, ?, ?)", what)  # noqa: S608
                connection.execute("COMMIT")
            for _, statement in indices:
                connection.execute(statement)
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
