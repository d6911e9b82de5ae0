"""How a rank and its launcher understand each other: the variables torchrun has, and a private folder of the run.

RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are those of torchrun (https://docs.pytorch.org/docs/stable/elastic/
run.html), so that the same module runs under it. EFT_RANKS is ours: a folder in the run folder, for this user alone,
whose name nobody can guess. The ranks find each other through a file in it (`torch.distributed.FileStore`): no port
is opened for that, so none can be taken and nobody else can knock. torchrun has no such folder; there it is MASTER_ADDR
and MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "EFT_RANKS"
LAUNCHER = "EFT_LAUNCHER"
"""Its process number: a rank that finds itself with another parent has outlived it."""
FENCE = "EFT_RANKS_FENCE"
"""Seconds of silence after which a rank ends itself, a space, and when its launcher last heard that the lease is held
(seconds of CLOCK_BOOTTIME). Heartbeats come on stdin then (core/spec/run/heartbeat.py). Not there: nobody has a
lease."""
STORE = "store"


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank a process is."""

    rank: int
    world: int
    local_rank: int
    folder: Path | None
    """None: torchrun is the launcher."""
    launcher: int | None = None
    fence_seconds: float | None = None
    held_at: float | None = None
    """See FENCE."""

    @classmethod
    def mine(cls) -> Seat:
        """From the environment. KeyError or ValueError when nobody has launched this process as a rank."""
        variables = os.environ
        folder, launcher = variables.get(FOLDER), variables.get(LAUNCHER)
        fence = [float(one) for one in variables.get(FENCE, "").split()]
        return cls(
            int(variables["RANK"]),
            int(variables["WORLD_SIZE"]),
            int(variables["LOCAL_RANK"]),
            None if folder is None else Path(folder),
            None if launcher is None else int(launcher),
            *fence,
        )


@dataclass(frozen=True, slots=True)
class LastWord:
    """Why a rank ends with an error."""

    at: float
    """time.monotonic(), which all processes of a machine share."""
    payload: dict[str, Any]
    """Of the error event (core/train/failures.py)."""
    lost_peer: bool
    """It has failed because another rank was gone, and knows no more than that."""


def leave_word(seat: Seat, payload: dict[str, Any], *, lost_peer: bool) -> None:
    """For the launcher, who tells what the first rank to end had to say. OSError when the disk refuses."""
    assert seat.folder is not None
    path = seat.folder / f"error-{seat.rank}.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(LastWord(time.monotonic(), payload, lost_peer))), encoding="utf-8")
    aside.replace(path)


def last_word(folder: Path, rank: int) -> LastWord | None:
    """None: it had none, or could not write it."""
    try:
        return LastWord(**json.loads((folder / f"error-{rank}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
