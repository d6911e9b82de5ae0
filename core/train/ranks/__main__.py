"""`python -m core.train.ranks RUN_DIR`: one rank of a run, started by launch.py, or by torchrun:

torchrun --nproc-per-node 2 --max-restarts 0 -m core.train.ranks RUN_DIR
"""

from __future__ import annotations

from core.train.__main__ import importing
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import leave
from core.train.ranks.begin import begin_rank


def main() -> int:
    run_dir = run_folder("core.train.ranks", "One of several ranks; `python -m core.train RUN_DIR` starts them.")
    if (begun := begin_rank("python -m core.train RUN_DIR")) is None:
        return 2
    rank_env, stop = begun
    with importing():
        from core.train.recipe import run  # slow: torch and transformers

    return run(run_dir, stop, rank_env)


if __name__ == "__main__":
    leave(main())
