"""How a rank and its launcher understand each other: the variables torchrun has, and a private folder of the run.

RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are those of torchrun (https://docs.pytorch.org/docs/stable/elastic/
run.html), so that the same module runs under it. EFT_RANKS is ours: a folder in the run folder, for this user alone,
with a name that cannot be guessed. The ranks find each other through a file in it (`torch.distributed.FileStore`). No
port is opened for that, so none can be taken and no other process can connect. torchrun has no such folder; there it is
MASTER_ADDR and MASTER_PORT.
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
(seconds of CLOCK_BOOTTIME). Heartbeats come on stdin then (core/spec/run). Absent: there is no lease."""
STORE = "store"


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Which rank a process is, from the variables of torchrun and our own."""

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
    def from_environ(cls) -> RankEnv:
        """Read the environment. KeyError or ValueError where this process was not launched as a rank."""
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
    """Payload of the error event (core/train/failures.py)."""
    lost_peer: bool
    """It has failed because another rank was gone, and knows no more than that."""


def leave_word(rank_env: RankEnv, payload: dict[str, Any], *, lost_peer: bool) -> None:
    """Write it for the launcher, which reports the error of the first rank to end. OSError when the disk refuses."""
    assert rank_env.folder is not None
    path = rank_env.folder / f"error-{rank_env.rank}.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(LastWord(time.monotonic(), payload, lost_peer))), encoding="utf-8")
    aside.replace(path)


def last_word(folder: Path, rank: int) -> LastWord | None:
    """Read what a rank has left; None: nothing, or it could not write it."""
    try:
        return LastWord(**json.loads((folder / f"error-{rank}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
