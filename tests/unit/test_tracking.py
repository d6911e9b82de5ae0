"""Trackers over their real libraries: what each has is read back by its own reader; kills in the middle."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from core.spec.axes.evaluation.tracking import Trackio
from core.spec.run.folder import EVENTS_FILE
from core.tools import ToolSet
from core.tracking.points import Points
from tests.support.service import ROOT, wait_for
from tests.support.tools import TRACKERS, tracker_tools
from worker.environment import tracker_environment

JOB = "job-01m84vq6fkd8bxd2rx3shwk9t6"
READERS = {
    "tensorboard": """
import glob, json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
(folder,) = glob.glob(sys.argv[1] + "/eft/voice intents job-*")
known = EventAccumulator(folder, size_guidance={"scalars": 0}); known.Reload()
print(json.dumps({name: [[one.step, one.value] for one in known.Scalars(name)] for name in known.Tags()["scalars"]}))
""",
    "mlflow": """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("eft").experiment_id])
assert run.info.status == "FINISHED" and run.info.run_name == "voice intents", run.info
assert run.data.params["method.r"] == "16" and run.data.tags["eft.tag.urgent"] == "true"
found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print(json.dumps({name: sorted([one.step, one.value] for one in points) for name, points in found.items()}))
""",
    "wandb": """
import glob, json, sys
from wandb.proto.wandb_internal_pb2 import Record

def records(data):  # LevelDB's log format (its doc/log_format.md) behind a header of 7 bytes
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""

found = {}
for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb")):
    for record in records(open(path, "rb").read()):
        items = {(one.key or ".".join(one.nested_key)): json.loads(one.value_json) for one in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append([items["_step"], value])
print(json.dumps(found))
""",
    "trackio": """
import json, os, sys
os.environ["TRACKIO_DIR"] = sys.argv[1]
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("eft")
assert run.name == "voice intents" and run.config["method.r"] == "16" and run.config["tags"] == "urgent", run.config
found = {}
for line in SQLiteStorage.get_logs("eft", run.name, run_id=run.id):
    for name in set(line) - {"step", "timestamp"}:
        found.setdefault(name, []).append([line["step"], line[name]])
print(json.dumps(found))
""",
}


def write_events(run_dir: Path, steps: range) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / EVENTS_FILE).open("a") as file:
        for step in steps:
            values: dict[str, Any] = {"loss": 1 / step, "grad_norm": None if step == 2 else step}
            line = {"seq": step, "type": "metrics", "time": 1.7e9 + step + len(run_dir.name), "step": step}
            file.write(json.dumps(line | {"values": values}) + "\n")
            if step % 5 == 0:
                line |= {"type": "evaluation", "values": {"eval_loss": 2 / step}}
                file.write(json.dumps(line) + "\n")


def mlflow_has_a_run(path: Path) -> bool:
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as database, suppress(sqlite3.OperationalError):  # no table yet, or locked
        return bool(database.execute("SELECT count(*) FROM runs").fetchone()[0])
    return False


def test_each_point_is_read_once_over_attempts_that_repeat_steps(tmp_path: Path) -> None:
    first, second = tmp_path / "attempt-2", tmp_path / "attempt-10"
    write_events(first, range(1, 8))
    with (first / EVENTS_FILE).open("a") as file:
        file.write('{"seq": 99, "type": "metr')  # its trainer was killed
    write_events(second, range(6, 10))
    points = Points(second, {"loss": 3})
    read = list(points.read())
    assert [(one.step, sorted(one.values)) for one in read] == [
        (1, ["grad_norm"]), (3, ["grad_norm"]), (4, ["grad_norm", "loss"]), (5, ["grad_norm", "loss"]),
        (5, ["eval_loss"]), (6, ["grad_norm", "loss"]), (7, ["grad_norm", "loss"]), (8, ["grad_norm", "loss"]),
        (9, ["grad_norm", "loss"]),
    ]  # fmt: skip
    write_events(second, range(10, 11))
    assert [one.step for one in points.read()] == [10, 10] and points.ended is None
    with (second / EVENTS_FILE).open("a") as file:
        file.write(json.dumps({"seq": 100, "type": "result", "time": 1.0, "result": {}}) + "\n")
    assert list(points.read()) == [] and points.ended == "result"


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_has_each_point_once_whatever_is_killed(tracker: ToolSet, tmp_path: Path) -> None:
    tools = tracker_tools(tracker)
    environment = tracker_environment(tools.folder, tmp_path, inherited={"PATH": os.environ["PATH"]})
    attempts = [tmp_path / "attempt-2", tmp_path / "attempt-3"]
    folder = tmp_path / tracker
    told = {"job": JOB, "name": "voice intents", "group": "eft", "params": {"method.r": "16"}, "tags": ["urgent"]}

    def begin(run_dir: Path) -> subprocess.Popen[bytes]:
        order = run_dir / "order.json"
        order.write_text(
            json.dumps({"tracker": tracker, "run_dir": str(run_dir), "told": told | {"folder": str(folder)}})
        )
        return subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "core/tracking/follow_program.py"), str(order)],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT, bufsize=0,
        )  # fmt: skip

    def had() -> dict[str, list[list[float]]]:
        done = subprocess.run(
            [sys.executable, "-c", READERS[tracker], str(folder)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
        return found

    write_events(attempts[0], range(1, 8))
    first = begin(attempts[0])
    assert first.stdin is not None
    if tracker == "wandb":  # its own process writes what it was told, whoever is killed
        first.stdin.write(b"open\n")
        assert first.wait(240) == 0
    else:
        written = folder / {"mlflow": "mlflow.db", "trackio": "eft.db"}.get(tracker, "")
        began = mlflow_has_a_run if tracker == "mlflow" else Path.exists
        wait_for(lambda: began(written) and first.poll() is None, 240, "its run")
        first.kill()
        first.wait()
    if tracker == "mlflow":  # as if it had been killed between making the run and telling its parameters
        with closing(sqlite3.connect(written)) as database, database:
            database.execute("DELETE FROM params")

    write_events(attempts[1], range(6, 12))
    second = begin(attempts[1])
    assert second.stdin is not None
    second.stdin.write(b"succeeded\n")
    assert second.wait(240) == 0, second.stderr.read() if second.stderr else ""
    found = had()
    assert found["loss"] == [[step, pytest.approx(1 / step)] for step in range(1, 12)]
    assert found["grad_norm"] == [[step, step] for step in range(1, 12) if step != 2]
    assert found["eval_loss"] == [[5, pytest.approx(0.4)], [10, pytest.approx(0.2)]]


@pytest.mark.parametrize("project", ["registry-intents", "intents_artifacts", "Intents_Traces"])
def test_a_project_that_trackio_keeps_for_itself_is_refused(project: str) -> None:
    with pytest.raises(ValidationError, match="trackio keeps names"):
        Trackio(project=project)
    assert Trackio(project="intents").project == "intents"
