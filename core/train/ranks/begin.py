"""How a rank begins: which one it is, its lifeline, and the way to the others."""

from __future__ import annotations

import os
import sys

from core.train.base.stop import Stop
from core.train.entry.fencing import arm_rank
from core.train.ranks.env import RankEnv
from core.train.ranks.launch import LOOPBACK


def begin_rank(way: str) -> tuple[RankEnv, Stop] | None:
    """Which rank this process is, and what asks it to stop; None where it was not launched as one, which it is told,
    with the `way` to start it."""
    try:
        rank_env = RankEnv.from_environ()
    except (KeyError, ValueError) as error:
        print(f"this is not a rank ({error!r}); start `{way}`", file=sys.stderr)
        return None
    stop = arm_rank(rank_env.launcher, rank_env.fence_seconds, rank_env.held_at)
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    return rank_env, stop
