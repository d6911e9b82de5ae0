"""kill -9 at random instants of grpo, rloo and ppo changes no bit, and no prompt is skipped or repeated. One seed a
stage; `python -m bench.kills` takes as many as are asked for."""

from __future__ import annotations

from pathlib import Path

from tests.support.random_kills import STAGES, kills

SEEDS = ("grpo:23", "rloo:17", "ppo:23")
"""Each is killed twice: in generation, rewards, advantages, updates and the optimizer."""


def test_kills_of_fixed_seeds_change_no_bit(tiny_dir: Path, tmp_path: Path) -> None:
    told = list(kills(tiny_dir, tmp_path, 12, 4, SEEDS))
    assert [(one["stage"], one["wrong"]) for one in told] == [(stage, None) for stage in STAGES], told
    assert all(one["killed"] for one in told) and any(one["resumed_at"] for one in told), told
