"""Random faults against resuming: `python -m bench.faults [--faults 200] [--seed 0] [--out FILE]`.

Runs of LoRA are disturbed until so many faults have met them (tests/support/random_faults.py says which). The report
counts the faults by kind and the runs that ended with other weights than the undisturbed one, or that used a checkpoint
which a fault had met. The last line is one JSON object; the exit code is 1 where a run is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.report import Children, conclude
from core import HOME
from tests.support import models
from tests.support.trainer import ENVIRONMENT

AT_ONCE = 10
"""Seeds that one process takes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    runs, spent = 0, Children()
    with tempfile.TemporaryDirectory() as folder:
        model = models.folder() / "tiny"
        while kinds.total() < asked.faults:
            first = asked.seed + runs
            seeds = [str(seed) for seed in range(first, first + AT_ONCE)]
            place = Path(folder) / str(first)
            command = [sys.executable, "-m", "tests.support.random_faults", str(model), str(place), *seeds]
            done = subprocess.run(command, cwd=HOME, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
            told = [json.loads(line) for line in done.stdout.splitlines()]
            if len(told) != len(seeds):
                raise SystemExit(f"the process of seeds {seeds} ended early: {done.stderr[-2000:]}")
            runs += len(told)
            for one in told:
                kinds.update(one["faults"])
                if one["wrong"] is not None:
                    wrong.append(f"seed {one['seed']}: {one['wrong']} ({', '.join(one['faults'])})")
            print(f"{runs} runs, {kinds.total()} faults, {len(wrong)} wrong", file=sys.stderr, flush=True)
    lines = [f"python -m bench.faults --faults {asked.faults} --seed {asked.seed}", ""]
    lines += [f"{runs} runs met {kinds.total()} faults; {len(wrong)} ended wrong", ""]
    lines += [f"{name:24} {count:5}" for name, count in kinds.most_common()]
    result = {"runs": runs, "faults": kinds.total(), "kinds": kinds}
    return conclude(lines, wrong, result, spent, asked.out)


if __name__ == "__main__":
    sys.exit(main())
