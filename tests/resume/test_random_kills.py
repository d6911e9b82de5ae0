"""kill -9 at random instants of grpo, rloo and ppo changes no bit, and no prompt is skipped or repeated. One seed a
stage; `python -m bench.kills` takes as many as are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.random_kills import STAGES
from tests.support.trainer import ENVIRONMENT, ROOT

SEEDS = ("grpo:23", "rloo:17", "ppo:23")
"""Each is killed twice: in generation, rewards, advantages, updates and the optimizer."""


def test_kills_of_fixed_seeds_change_no_bit(tiny_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.random_kills", str(tiny_dir), str(tmp_path), "12", "4", *SEEDS]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [one["stage"] for one in told] == list(STAGES), (told, done.stderr)
    assert all(one["killed"] for one in told) and any(one["resumed_at"] for one in told), told
