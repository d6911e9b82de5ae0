"""Recipes of Tinker's cookbook, unmodified, with a small model: `python -m bench.cookbook` runs all that can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import cookbook

SUPERVISED = "sl_loop batch_size=8 max_steps=4 save_every=2 lora_rank=4 learning_rate=0.01"
STEPS, GROUPS = 6, 2
REWARDED = f"math_rl.train loss_fn=importance_sampling lora_rank=4 max_tokens=8 group_size=32 max_steps={STEPS} "
REWARDED += f"groups_per_batch={GROUPS} learning_rate=0.002 eval_every=0 save_every=0"
Run = Callable[[str, Path], tuple[int, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Run]]:
    """A folder, and what runs a recipe."""
    service, overlay = cookbook.started(tmp_path_factory.mktemp("cookbook"), taught=(STEPS, GROUPS))
    try:
        with cookbook.forking(service, overlay, "sl_loop", "math_rl.train") as run:
            yield service.folder, run
    finally:
        service.stop()


def test_sl_loop_learns_and_goes_on_to_the_bit(place: tuple[Path, Run]) -> None:
    """Resumed from its second step, it comes to the same losses."""
    folder, run = place
    log = folder / "sl_loop"
    code, output = run(SUPERVISED, log)
    assert code == 0, output[-4000:]
    losses = [step["train_mean_nll"] for step in cookbook.metrics(log)]
    assert len(losses) == 4 and losses[-1] < 0.95 * losses[0]
    kept = [line for line in (log / "checkpoints.jsonl").read_text().splitlines() if json.loads(line)["batch"] == 2]
    assert len(kept) == 1
    (log / "checkpoints.jsonl").write_text(kept[0] + "\n")
    (log / "metrics.jsonl").unlink()
    code, output = run(SUPERVISED, log)
    assert code == 0, output[-4000:]
    assert [step["train_mean_nll"] for step in cookbook.metrics(log)] == losses[2:]


def test_math_rl_learns_from_samples_of_what_it_trains(place: tuple[Path, Run]) -> None:
    """A model that knows the sums, but whose answers are right half of the time, comes to give right ones. In exact
    sessions the cookbook's own estimate of the divergence of sampler and trainer is 0."""
    folder, run = place
    log = folder / "math_rl"
    code, output = run(REWARDED, log)
    assert code == 0, output[-4000:]
    steps = [step for step in cookbook.metrics(log) if "optim/kl_sample_train_v1" in step]
    assert len(steps) == STEPS
    for step in steps:
        assert step["optim/kl_sample_train_v1"] == 0.0 and step["optim/kl_sample_train_v2"] == 0.0
    rewards = [step["env/all/reward/total"] for step in steps]
    first, last = (sum(two) / 2 for two in (rewards[:2], rewards[-2:]))
    assert last > 0.8 and last > first + 0.12, rewards
