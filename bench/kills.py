"""kill -9 of reinforcement learning:
`python -m bench.kills [--kills 51] [--prompts 1000] [--most 12] [--seed 0] [--out FILE]`.

Runs of grpo, rloo and ppo over so many prompts are killed at random instants, each run at most `--most` times, until
each stage has met its third of the kills (tests/support/random_kills.py says how). The report counts the kills by stage
and part of a step, and the runs that ended with other weights or answers than the undisturbed one, or that left out or
repeated a prompt. The last line is one JSON object; the exit code is 1 where a run is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.report import Children, conclude
from core import HOME
from tests.support import models
from tests.support.random_kills import STAGES
from tests.support.trainer import ENVIRONMENT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=51)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--most", type=int, default=12, help="kills of a run at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    wanted = -(-asked.kills // len(STAGES))
    kinds: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    runs, resumed, spent = 0, 0, Children()
    with tempfile.TemporaryDirectory() as folder:
        model = models.folder() / "tiny"
        for stage in STAGES:
            # more seeds than it can take: it is stopped when it has met its kills
            seeds = [f"{stage}:{asked.seed + number}" for number in range(10 * wanted)]
            numbers = [str(asked.prompts), str(asked.most)]
            command = [sys.executable, "-m", "tests.support.random_kills", str(model), folder, *numbers]
            met = 0
            with subprocess.Popen(
                [*command, *seeds],
                cwd=HOME,
                env=os.environ | ENVIRONMENT,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            ) as process:
                assert process.stdout is not None
                while met < wanted and (line := process.stdout.readline()):
                    one = json.loads(line)
                    runs, met, resumed = runs + 1, met + len(one["killed"]), resumed + len(one["resumed_at"])
                    kinds.update((stage, part) for part in one["killed"])
                    if one["wrong"] is not None:
                        wrong.append(f"{stage}, seed {one['seed']}: {one['wrong']} ({', '.join(one['killed'])})")
                    print(f"{stage}: {met} kills, {len(wrong)} wrong", file=sys.stderr, flush=True)
                os.killpg(process.pid, signal.SIGKILL)  # with the attempt that it has forked
            if met < wanted:
                raise SystemExit(f"the runs of {stage} ended early")
    kills = kinds.total()
    options = f"--kills {asked.kills} --prompts {asked.prompts} --most {asked.most} --seed {asked.seed}"
    lines = [f"python -m bench.kills {options}", ""]
    lines += [f"{runs} runs over {asked.prompts} prompts met {kills} kills; {len(wrong)} ended wrong"]
    lines += [f"{resumed} attempts continued from a checkpoint, the others began anew", ""]
    lines += [f"{stage:6} {part:22} {met:4}" for (stage, part), met in sorted(kinds.items())]
    by_stage = {name: sum(met for (stage, _), met in kinds.items() if stage == name) for name in STAGES}
    result = {"runs": runs, "prompts": asked.prompts, "kills": kills, "by_stage": by_stage, "resumed": resumed}
    return conclude(lines, wrong, result, spent, asked.out)


if __name__ == "__main__":
    sys.exit(main())
