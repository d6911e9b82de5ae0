"""Long curves of a job, thinned out once and kept in a file of its run folder, so that no page reads them whole again.

Of each run of so many points, the file keeps the smallest and the largest. It covers a curve from its first step to a
step from which on nothing is settled yet; the points behind that one come from the database. The last covered point is
looked up in the database with them: where it is another one (the database was restored, say), the file does not count.
Nor does it for another attempt, which may do steps again.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from core.jobs.views import queries

log = logging.getLogger("eft.curves")

VERSION = 1

_POINT = np.dtype([("step", "i8"), ("value", "f8"), ("time", "f8"), ("attempt", "i8")])


@dataclass(frozen=True, slots=True)
class Level:
    """A curve up to its last covered point: two points of each run, and its first one."""

    kept: NDArray[Any]
    rows: int
    """Points that it stands for."""
    last: tuple[int, float]
    """Step and value of the last covered point, whether kept or not."""

    def between(self, first: int | None, last: int | None) -> list[queries.Point]:
        """What is kept from step `first` to `last`."""
        steps = self.kept["step"]
        begin = 0 if first is None else np.searchsorted(steps, first)
        end = len(steps) if last is None else np.searchsorted(steps, last, "right")
        found: list[queries.Point] = self.kept[begin:end].tolist()
        return found


def extended(level: Level | None, points: Sequence[queries.Point], settled: int, run: int) -> Level | None:
    """The level with as many of these further points, in the order of their steps, as whole runs of `run` points allow;
    at most the first `settled` of them. None: there is no whole run yet."""
    whole = settled // run * run
    if not whole:
        return level
    found = np.array(points[:whole], _POINT)
    runs = found.reshape(-1, run)
    low, high = runs["value"].argmin(1), runs["value"].argmax(1)
    high[low == high] = run - 1  # all equal: two points as well, so that parts of a curve weigh alike
    at = np.sort(np.stack([low, high], 1), 1) + np.arange(len(runs))[:, None] * run
    kept = found[at.ravel()]
    if level is None:
        kept = kept if at[0, 0] == 0 else np.concatenate([found[:1], kept])
    else:
        kept = np.concatenate([level.kept, kept])
    step, value, *_ = points[whole - 1]
    return Level(kept, whole + (0 if level is None else level.rows), (step, value))


def load(file: Path, attempt: int) -> dict[str, Level]:
    """Levels by metric; none where there is no file, it is of another attempt, or damaged."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            if (about["version"], about["attempt"]) != (VERSION, attempt):
                return {}
            return {
                name: Level(stored[f"kept-{at}"].astype(_POINT), rows, (step, value))
                for at, (name, rows, step, value) in enumerate(about["curves"])
            }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        log.warning("%s cannot be read and is made again: %s", file, error)
        return {}


def save(file: Path, attempt: int, levels: dict[str, Level]) -> None:
    """Write the file, whole or not at all. A folder that is gone is not made again: its job was deleted."""
    curves = [(name, level.rows, *level.last) for name, level in levels.items()]
    about = json.dumps({"version": VERSION, "attempt": attempt, "curves": curves}).encode()
    aside = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        with aside.open("xb") as stream:
            aside.chmod(0o600)
            arrays: dict[str, Any] = {f"kept-{at}": level.kept for at, level in enumerate(levels.values())}
            np.savez(stream, about=np.frombuffer(about, "u1"), **arrays)
        aside.replace(file)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be written, so curves are read whole: %s", file, error)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
