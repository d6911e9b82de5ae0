"""Schedules: every formula against transformers at every step; those that follow evaluations against torch and
transformers after every evaluation; and what a spec may say."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import get_scheduler
from transformers.optimization import GreedyLR

from core.errors import SpecError
from core.plan.compatibility import check
from core.plan.steps import warmup_steps
from core.spec.axes.optimizer import Schedule
from core.spec.load import parse_job
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.base.stop import Stop
from core.train.optim.schedules import build_schedule
from tests.support.trainer import events, pairs, run, weights, write_rows, write_run

READ: TypeAdapter[Any] = TypeAdapter(Schedule)
KWARGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "linear"}, {}),
    ({"type": "cosine"}, {}),
    ({"type": "cosine_with_restarts", "num_cycles": 1}, {"num_cycles": 1}),
    ({"type": "cosine_with_restarts", "num_cycles": 3}, {"num_cycles": 3}),
    ({"type": "cosine_with_min_lr", "min_lr_rate": 0.2}, {"min_lr_rate": 0.2}),
    ({"type": "cosine_warmup_with_min_lr", "min_lr_rate": 0.2}, {"min_lr_rate": 0.2}),
    (
        {"type": "cosine_warmup_with_min_lr", "min_lr_rate": 0.0, "warmup_lr_rate": 0.3},
        {"min_lr_rate": 0.0, "warmup_lr_rate": 0.3},
    ),
    ({"type": "polynomial", "power": 2.5, "min_lr_rate": 0.05}, {"power": 2.5, "lr_end": 0.05}),
    ({"type": "polynomial"}, {"power": 1.0, "lr_end": 0.0}),
    ({"type": "constant"}, {}),
    ({"type": "constant_with_warmup"}, {}),
    ({"type": "inverse_sqrt"}, {}),
    ({"type": "inverse_sqrt", "timescale": 40}, {"timescale": 40}),
    *(
        (
            {"type": "warmup_stable_decay", "decay_steps": 9, "decay_type": shape, "min_lr_rate": 0.1},
            {"num_decay_steps": 9, "decay_type": shape, "min_lr_ratio": 0.1},
        )
        for shape in ("linear", "cosine", "1-sqrt")
    ),
]


def oracle(name: str, warmup: int, total: int, **kwargs: Any) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=kwargs)
    return optimizer, found


@pytest.mark.parametrize("total", [20, 101])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("written", "kwargs"), KWARGS, ids=[str(list(w.values())) for w, _ in KWARGS])
def test_every_step_is_that_of_transformers(
    written: dict[str, Any], kwargs: dict[str, Any], warmup: int, total: int
) -> None:
    spec = READ.validate_python(written if written["type"] == "constant" else {**written, "warmup_steps": warmup})
    optimizer, reference = oracle(written["type"], warmup, total, **kwargs)
    ours = build_schedule(spec, total)
    for step in range(total):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        reference.step()


def scores(count: int, seed: int) -> list[float]:
    """Losses that fall, stall and rise."""
    chance = random.Random(seed)
    found, now = [], 3.0
    for place in range(count):
        now += chance.uniform(-0.1, 0.01) if (place // 12) % 2 == 0 else chance.uniform(-0.01, 0.03)
        found.append(now)
    return found


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateau_is_torchs_after_every_evaluation(better: Any, cooldown: int) -> None:
    options = {"factor": 0.5, "patience": 2, "threshold": 1e-3, "cooldown": cooldown}
    mode = "min" if better == "lower" else "max"
    optimizer, reference = oracle("reduce_lr_on_plateau", 0, 0, mode=mode, min_lr=0.02, **options)
    history: list[dict[str, float]] = [{"step": 0, "eval_loss": -9.0}]  # the untrained model's does not count
    ours = build_schedule(
        READ.validate_python({"type": "reduce_lr_on_plateau", "min_lr_rate": 0.02, "warmup_steps": 0, **options}),
        100,
        lambda: history,
        better=better,
    )
    seen = set()
    for step, score in enumerate(scores(80, seed=1), start=1):
        value = score if better == "lower" else -score + 20
        history.append({"step": step, "eval_loss": value})
        reference.step(value)
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        seen.add(ours(step))
    assert min(seen) == 0.02, "the series never reached the lower bound"
    assert len(seen) > 3


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_greedy_is_transformers_after_every_evaluation(better: Any) -> None:
    options: dict[str, Any] = {"factor": 0.7, "patience": 1, "threshold": 1e-3, "cooldown": 1}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    mode = "min" if better == "lower" else "max"
    reference = GreedyLR(optimizer, mode=mode, min_lr=0.3, max_lr=2.0, warmup=2, reset_start=2, **options)
    history: list[dict[str, float]] = []
    spec = READ.validate_python(
        {
            "type": "greedy",
            "min_lr_rate": 0.3,
            "max_lr_rate": 2.0,
            "rise_cooldown": 2,
            "reset_after": 2,
            "warmup_steps": 0,
            **options,
        }
    )
    ours = build_schedule(spec, 200, lambda: history, better=better)
    seen = []
    for step, score in enumerate(scores(160, seed=2), start=1):
        value = score if better == "lower" else -score
        history.append({"step": step, "eval_loss": value})
        reference.step(value)
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        seen.append(ours(step))
    assert max(seen) > 1.0
    assert 0.3 in seen, "the series never reached the lower bound"
    assert (0.3, 1.0) in itertools.pairwise(seen), "no reset"


def test_warmup_in_steps_or_as_a_share() -> None:
    assert warmup_steps(100, READ.validate_python("linear")) == 3
    assert warmup_steps(100, READ.validate_python({"type": "linear", "warmup_steps": 10})) == 10
    assert warmup_steps(100, READ.validate_python("constant")) == 0
    read = READ.validate_python({"type": "cosine", "warmup_steps": 0})
    assert READ.validate_python(read.model_dump()) == read, "what is stored is read again"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"type": "linear", "warmup_ratio": 0.1, "warmup_steps": 5}, "`warmup_ratio` and `warmup_steps`"),
        ({"type": "linear", "warmup_ratio": None}, "set one of them"),
        ({"type": "warmup_stable_decay", "decay_ratio": 0.1, "decay_steps": 5}, "`decay_ratio` and `decay_steps`"),
        ({"type": "constant", "warmup_steps": 5}, "warmup_steps"),
        ({"type": "cosine", "num_cycles": 2}, "num_cycles"),
    ],
)
def test_what_a_schedule_cannot_be(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        READ.validate_python(schedule)
    with pytest.raises(SpecError) as refused:
        parse_job({"model": "a/b", "data": "/rows.jsonl", "schedule": schedule})
    assert str(refused.value.field).startswith("schedule")


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_of_evaluations_needs_evaluations(schedule: str) -> None:
    job = {"model": "a/b", "data": {"train": "/a.jsonl", "eval": "/b.jsonl"}, "schedule": schedule}
    (fault,) = check(parse_job(job))
    assert (fault.code, fault.field) == ("schedule_without_evaluations", "schedule")
    assert "evaluation.eval_steps" in fault.message
    assert not check(parse_job({**job, "evaluation": {"eval_steps": 5}}))


class StopAfter(Stop):
    """Asked to leave once so many steps were reported."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir, self.steps = run_dir, steps

    @property  # type: ignore[override]
    def requested(self) -> bool:
        return len(events(self.run_dir, "metrics")) >= self.steps


def test_a_run_that_is_stopped_goes_on_with_the_rate_it_had(tiny_dir: Path, tmp_path: Path) -> None:
    """The learning rate follows evaluations of both attempts; weights and rates are those of a run in one piece."""
    train = write_rows(tmp_path / "train.jsonl", pairs(8))
    axes: dict[str, Any] = {
        "held_out": write_rows(tmp_path / "held.jsonl", pairs(2)),
        "method": {"type": "lora", "r": 2},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"type": "reduce_lr_on_plateau", "patience": 0, "threshold": 0.5, "factor": 0.5, "warmup_steps": 1},
        "evaluation": {"eval_steps": 1},
        "training": {"max_steps": 8, "per_device_train_batch_size": 2, "max_length": 32, "precision": "fp32"},
    }

    def rates(*runs: Path) -> list[float]:
        told = {event["step"]: event["values"]["learning_rate"] for path in runs for event in events(path, "metrics")}
        return [told[step] for step in sorted(told)]

    whole = write_run(tmp_path / "whole", tiny_dir, train, **axes)
    assert run(whole) == EXIT_OK, events(whole)[-1]
    assert rates(whole) == [0.0, *(1e-2 / 2 ** max(0, step - 1) for step in range(1, 8))]
    first = write_run(tmp_path / "first", tiny_dir, train, **axes)
    assert run(first, StopAfter(first, 4)) == EXIT_CHECKPOINTED, events(first)[-1]
    second = write_run(tmp_path / "second", tiny_dir, train, resume_from=[first], **axes)
    assert run(second) == EXIT_OK, events(second)[-1]
    assert rates(first, second) == rates(whole)
    assert weights(second) == weights(whole)
