"""Runs of several ranks, one after another in the same processes: `torchrun … -m tests.support.gang RUN_DIR…`.

Starting a rank is seconds, and the runs of tests are less. The first run is begun as `-m core.train.ranks RUN_DIR`
would begin it, the others go on from `run` with the environment that a launcher would have given. `forked` makes the
ranks of this process, as the product's launcher does on a CPU (core/train/ranks/launch.py); `under_torchrun` has
torchrun make them, whose process is a fork too.
`RUN_DIR@RANK:PLACE` asks one rank alone to leave, at the n-th place in training where it looks whether it should.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from core.train.base.stop import Stop
from core.train.ranks import __main__ as rank_main
from core.train.ranks.env import FOLDER, RankEnv
from tests.support.trainer import Forked

CODES = "codes.json"
"""In the first run's folder: the exit code of every run, as rank 0 had it. Other ranks: `codes-1.json` and so on."""


class AskedAt(Stop):
    """Asked to leave at the n-th place after training began.

    Rank 0 has told of that before it looks, and others cannot know whether they read that a moment before or after:
    they know it by who asks (`Loop._asked`, all ranks together), their runs having no evaluation before training."""

    def __init__(self, place: int, run_dir: Path, rank: int = 0) -> None:
        self._left, self._run_dir, self._training = place, run_dir, False
        self._rank = rank

    @property  # type: ignore[override]
    def requested(self) -> bool:
        if not self._training:
            path = self._run_dir / "events.jsonl"
            told = path.exists() and b'"phase":"training"' in path.read_bytes()
            self._training = told if self._rank == 0 else sys._getframe(1).f_code.co_name == "_asked"
            return False
        self._left -= 1
        return self._left < 0


def forked(*arguments: str, ranks: int = 2) -> list[int]:
    """The runs, by forks of this process, which has imported all; the exit status of each rank. The death of one is the
    end of all, which would wait for it."""

    def become(rank: int) -> int:
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in of_torchrun.items()} | {FOLDER: arguments[0]})
        sys.argv = [__file__, *arguments]
        return main()

    processes = [Forked(Path(arguments[0]), program=partial(become, rank)) for rank in range(ranks)]
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        time.sleep(0.005)
    for process in processes:
        if any(codes):
            process.send_signal(signal.SIGKILL)
    return [process.wait() for process in processes]


def under_torchrun(*arguments: str, ranks: int = 2) -> int:
    """The runs under the real torchrun, and its exit status. `--run-path` and `--start-method fork` are options of its
    own by which it forks its ranks: they, and it, need not import torch anew. (As processes that do it starts them in
    tests/rehearsal/test_runs.py.)"""

    def become() -> int:
        from torch.distributed import run

        how = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0", "--start-method", "fork")
        run.main([*how, "--run-path", __file__, *arguments])
        return 0

    return Forked(Path(arguments[0]), program=become).wait()


def main() -> int:
    first, *more = sys.argv[1:]
    rank_env = RankEnv.from_environ()
    sys.argv = [rank_main.__file__, first]
    codes = [rank_main.main()]
    import torch.distributed as dist

    from core.train.recipe import run

    for argument in more:
        folder, _, asked = argument.partition("@")
        rank, _, place = asked.partition(":")
        run_dir = Path(folder)
        stop = AskedAt(int(place), run_dir, rank_env.rank) if asked and int(rank) == rank_env.rank else Stop()
        codes.append(run(run_dir, stop, replace(rank_env, folder=run_dir)))
        if dist.is_initialized():  # one that left early would have ended its process
            dist.destroy_process_group()
    name = CODES if rank_env.rank == 0 else f"codes-{rank_env.rank}.json"
    (Path(first) / name).write_text(json.dumps(codes))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    status = main()
    if multiprocessing.parent_process() is None:  # otherwise torchrun waits until it returns
        os._exit(status)
