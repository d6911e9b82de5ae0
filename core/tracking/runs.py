"""The trackers: each takes points and says which it has. Their libraries are imported where they are used: every
process has one of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from core.tracking.points import Point

Status = Literal["succeeded", "failed", "cancelled", "open"]
"""How the job has ended; `open`: it goes on in another attempt."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a tracker is told of a job beside its curves."""

    job: str
    """Its id."""
    name: str
    group: str
    """Experiment or project of the tracker."""
    params: Mapping[str, str]
    """Fields of the resolved spec by their dotted paths."""
    tags: Sequence[str]
    folder: Path
    """Where the tracker keeps what it writes on this machine."""


class TrackerRun(Protocol):
    """A run of a tracker that is open."""

    def had(self) -> Mapping[str, int]:
        """The last step of each name that it has of the job."""

    def take(self, points: Sequence[Point]) -> None:
        """Store them. May raise; the same points are offered again then."""

    def close(self, status: Status) -> None:
        """Store what it holds back, and how the job has ended."""


class TensorBoardRun:
    """Event files in a folder of the job; TensorBoard shows several files of a folder as one run."""

    def __init__(self, told: Told) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        run = told.job if told.name == told.job else f"{told.name} {told.job}"
        self._folder = told.folder / told.group / run
        self._folder.mkdir(parents=True, exist_ok=True)
        self._had = self._read()
        self._writer = EventFileWriter(str(self._folder))

    def _read(self) -> dict[str, int]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        known = EventAccumulator(str(self._folder), size_guidance={"scalars": 0, "tensors": 0})
        known.Reload()
        return {name: known.Scalars(name)[-1].step for name in known.Tags()["scalars"]}

    def had(self) -> Mapping[str, int]:
        return self._had

    def take(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, status: Status) -> None:
        self._writer.close()


class MLflowRun:
    """A run that is found again by the job's id among its tags."""

    BATCH = 1000
    """Most metrics of a request, by MLflow's REST API."""
    PARAMS = 100
    """Most parameters of a request."""
    ENDS: Mapping[Status, str] = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}

    def __init__(self, told: Told) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or self._database(told)
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(told.group)
        experiment = known.experiment_id if known is not None else self._made(told)
        runs = self._client.search_runs([experiment], f"tags.`eft.job` = '{told.job}'", max_results=1)
        known_params: Mapping[str, str] = {}
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            known_params = runs[0].data.params  # not all of them if the attempt that made the run was killed then
        else:
            tags = {"eft.job": told.job, **{f"eft.tag.{tag}": "true" for tag in told.tags}}
            self._run = self._client.create_run(experiment, run_name=told.name, tags=tags).info.run_id
        params = [Param(name, value[:500]) for name, value in told.params.items() if name not in known_params]
        for start in range(0, len(params), self.PARAMS):
            self._client.log_batch(self._run, params=params[start : start + self.PARAMS])

    def _database(self, told: Told) -> str:
        """The URI of the database on this machine. MLflow makes its tables in several transactions, and one that was
        killed between them leaves a database that none can open: so they are made in a file aside."""
        from mlflow.tracking import MlflowClient

        told.folder.mkdir(parents=True, exist_ok=True)
        path, aside = told.folder / "mlflow.db", told.folder / f".{told.job}.mlflow.db"
        if not path.exists():
            aside.unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
            with contextlib.suppress(FileExistsError):  # another job's tracker was quicker
                path.hardlink_to(aside)
            aside.unlink()
        return f"sqlite:///{path}"

    def _made(self, told: Told) -> str:
        """A new experiment. By default, MLflow would keep its files in the folder that this process runs in."""
        here = None if os.environ.get("MLFLOW_TRACKING_URI") else (told.folder / "artifacts").as_uri()
        made: str = self._client.create_experiment(told.group, artifact_location=here)
        return made

    def had(self) -> Mapping[str, int]:
        names = self._client.get_run(self._run).data.metrics
        return {name: max(one.step for one in self._client.get_metric_history(self._run, name)) for name in names}

    def take(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        told = [
            Metric(name.replace("@", "-"), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(told), self.BATCH):  # what a repeated request has told before is one point there
            self._client.log_batch(self._run, metrics=told[start : start + self.BATCH])

    def close(self, status: Status) -> None:
        if status in self.ENDS:
            self._client.set_terminated(self._run, self.ENDS[status])


class WandBRun:
    """A run with the job's id, online with a key, else in a folder for `wandb sync`."""

    def __init__(self, told: Told) -> None:
        import wandb

        told.folder.mkdir(parents=True, exist_ok=True)
        self._last: dict[str, int] = {}
        self._state = told.folder / f"{told.job}.json"
        online = bool(os.environ.get("WANDB_API_KEY")) and os.environ.get("WANDB_MODE", "online") == "online"
        self._run = wandb.init(
            project=told.group.replace("/", "-"),
            id=told.job,
            name=told.name,
            tags=list(told.tags),
            config=dict(told.params),
            dir=str(told.folder),
            mode="online" if online else "offline",
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )

    def had(self) -> Mapping[str, int]:
        # Offline, its library does not say what earlier processes have told.
        with contextlib.suppress(FileNotFoundError):
            self._last = json.loads(self._state.read_text(encoding="utf-8"))
        return self._last

    def take(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values) | {"_timestamp": point.time}, step=point.step)
            self._last |= dict.fromkeys(point.values, point.step)
        work = self._state.with_suffix(".tmp")
        work.write_text(json.dumps(self._last), encoding="utf-8")
        work.replace(self._state)

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status in ("failed", "cancelled") else 0)


class TrackioRun:
    """A run with the job's id in the store that trackio keeps in a folder. Each call of it is one transaction, which is
    written when the call returns; its own logger tells in the background, and does not say what has arrived."""

    def __init__(self, told: Told) -> None:
        told.folder.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(told.folder)  # read when it is imported
        from trackio.sqlite_storage import SQLiteStorage

        self._store: Any = SQLiteStorage
        self._told = told
        self._store.validate_project_name(told.group)

    def had(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for line in self._store.get_logs(self._told.group, self._told.name, run_id=self._told.job):
            found |= {name: max(line["step"], found.get(name, 0)) for name in line if name not in ("timestamp", "step")}
        return found

    def take(self, points: Sequence[Point]) -> None:
        told = self._told
        self._store.bulk_log(
            told.group,
            told.name,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            config={**told.params, "tags": ", ".join(told.tags), "eft.job": told.job},
            # what is offered again has the id that it had: a name is reported once a step
            log_ids=[f"{told.job}-{point.step}-{min(point.values, default='')}" for point in points],
            run_id=told.job,
        )

    def close(self, status: Status) -> None:
        """Nothing is held back, and trackio has no word for how a run ended."""
