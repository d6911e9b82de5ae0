"""`python -m core.train.ranks RUN_DIR`: one rank of a run, started by launch.py, or by torchrun:

torchrun --nproc-per-node 2 --max-restarts 0 -m core.train.ranks RUN_DIR
"""

from __future__ import annotations

import os
import sys

from core.train.__main__ import importing
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm_rank, leave
from core.train.ranks.env import RankEnv
from core.train.ranks.launch import LOOPBACK


def main() -> int:
    run_dir = run_folder("core.train.ranks", "One of several ranks; `python -m core.train RUN_DIR` starts them.")
    try:
        rank_env = RankEnv.from_environ()
    except (KeyError, ValueError) as error:
        print(f"this is not a rank ({error!r}); start `python -m core.train RUN_DIR`", file=sys.stderr)
        return 2
    stop = arm_rank(rank_env.launcher, rank_env.fence_seconds, rank_env.held_at)
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    with importing():
        from core.train.recipe import run  # slow: torch and transformers

    return run(run_dir, stop, rank_env)


if __name__ == "__main__":
    leave(main())
