"""The points of a job's curves, each once, from the events of its attempts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.spec.run.folder import EVENTS_FILE

WITH_VALUES = ("metrics", "evaluation")


@dataclass(frozen=True, slots=True)
class Point:
    """What an event tells of a step."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: Mapping[str, float]


class Points:
    """Follows the events of a job's attempts up to that of `run_dir`. A step that is repeated after a crash has the
    same values, and the first is taken; so is one that the tracker has had from an earlier process."""

    def __init__(self, run_dir: Path, had: Mapping[str, int]) -> None:
        """`had`: the last step of each name that the tracker has."""
        this = _number(run_dir)
        attempts = [folder for folder in run_dir.parent.glob("attempt-*") if _number(folder) <= this]
        self._files = [folder / EVENTS_FILE for folder in sorted(attempts, key=_number)]
        self._offsets = dict.fromkeys(self._files, 0)
        self._last = dict(had)
        self.ended: str | None = None
        """`result` or `error` once the attempt has told its end."""

    def read(self) -> Iterator[Point]:
        """The points that are new."""
        for path in self._files:
            for event in self._events(path):
                if path == self._files[-1] and event["type"] in ("result", "error"):
                    self.ended = event["type"]
                if event["type"] in WITH_VALUES and (values := self._new(event["step"], event["values"])):
                    yield Point(event["step"], event["time"], values)

    def _new(self, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        found = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value) and step > self._last.get(name, -1)
        }
        self._last.update(dict.fromkeys(found, step))
        return found

    def _events(self, path: Path) -> Iterator[dict[str, Any]]:
        """Events in whole lines behind those that were read."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offsets[path] += len(line)
                    yield json.loads(line)
        except FileNotFoundError:
            return


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
