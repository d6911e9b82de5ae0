"""Sweeps as documents: points, limits, the values of a run, and which runs stop early."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import SpecError
from core.jobs.base.states import Status
from core.jobs.lifecycle.sweeps.rungs import SweepRun, next_move
from core.spec.sweep import Halving, Range, job_at, parse_sweep, points

RATES = {"optimizer.learning_rate": [1e-4, 2e-4], "method.r": [8, 16, 32]}


def test_a_grid_has_every_combination_in_order() -> None:
    sweep, job = parse_sweep({"model": "m", "sweep": RATES})
    assert job == {"model": "m"}
    found = points(sweep)
    assert len(found) == 6 and found[0] == {"optimizer.learning_rate": 1e-4, "method.r": 8}
    assert found[-1] == {"optimizer.learning_rate": 2e-4, "method.r": 32}


def test_the_short_form_takes_a_sweeps_own_names_beside_the_fields() -> None:
    halving = {"steps": [2, 4]}
    sweep, _ = parse_sweep({"sweep": RATES | {"halving": halving, "metric": "eval_loss", "seed": [1, 2]}})
    assert (
        sweep
        == parse_sweep({"sweep": {"fields": RATES | {"seed": [1, 2]}, "halving": halving, "metric": "eval_loss"}})[0]
    )
    rates = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-3}}
    sweep, _ = parse_sweep({"sweep": rates | {"count": 3, "seed": 7}})
    assert sweep == parse_sweep({"sweep": {"type": "random", "fields": rates, "count": 3, "seed": 7}})[0]


def test_random_points_are_those_of_their_seed_within_their_ranges_and_differ() -> None:
    fields = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-3, "scale": "log"}, "method.r": {"min": 4, "max": 64}}
    raw = {"type": "random", "fields": fields, "count": 40, "seed": 7}
    found = [points(parse_sweep({"sweep": raw | {"seed": seed}})[0]) for seed in (7, 7, 8)]
    assert found[0] == found[1] != found[2]
    rates = [point["optimizer.learning_rate"] for point in found[0]]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates) and sum(rate < 1e-4 for rate in rates) in range(10, 31)
    assert all(type(point["method.r"]) is int and 4 <= point["method.r"] <= 64 for point in found[0])
    assert len({str(point) for point in found[0]}) == 40
    assert Range(min=0, max=10).draw(0.96) == 10 and Range(min=0.0, max=1.0).draw(1 / 3) == 0.3333


@pytest.mark.parametrize(
    ("sweep", "code", "field", "words"),
    [
        ({"a": list(range(100)), "b": list(range(100))}, "sweep_too_large", "sweep.fields", "10,000 runs"),
        ({"type": "random", "fields": {"a": [1]}, "count": 201}, "sweep_too_large", "sweep.count", "at most 200"),
        ({"type": "random", "fields": {"a": [1, 2]}, "count": 3}, "invalid_value", "sweep.count", "only 2 different"),
        ({"type": "random", "fields": {"a": [1]}}, "invalid_value", "sweep.count", "required"),
        ({"fields": {"a": {"min": 1, "max": 2}}}, "invalid_value", "sweep.fields.a", "list"),
        ({"name": ["a", "b"]}, "invalid_value", "sweep.fields.name", "all runs share `name`"),
        ({"a": []}, "invalid_value", "sweep.fields.a", "at least 1"),
        ({"fields": {"a": [1]}, "halving": {"steps": [4, 2]}}, "invalid_value", "sweep.halving", "ascend"),
        ([1], "invalid_value", "sweep", "a sweep is a job"),
    ],
)
def test_what_is_no_sweep_is_refused_by_its_field(sweep: Any, code: str, field: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        points(parse_sweep({"model": "m", "sweep": sweep})[0])
    assert (refused.value.code, refused.value.field) == (code, field), refused.value.message
    assert words in refused.value.message


def test_the_values_of_a_run_go_where_the_field_says() -> None:
    job = {"model": "m", "method": "lora", "training": {"max_steps": 4}}
    made = job_at(job, {"method.r": 8, "training.seed": 3, "optimizer.learning_rate": 1e-3})
    assert made["method"] == {"type": "lora", "r": 8} and made["training"] == {"max_steps": 4, "seed": 3}
    assert made["optimizer"] == {"learning_rate": 1e-3} and job["method"] == "lora"
    with pytest.raises(SpecError, match="`model` is not an object"):
        job_at(job, {"model.revision": "x"})


def runs(*told: tuple[str, dict[int, float]]) -> list[SweepRun]:
    return [SweepRun(f"job-{number}", Status(status), values) for number, (status, values) in enumerate(told)]


HALVING = Halving(steps=[2, 4], keep=0.5)


def test_runs_are_compared_when_all_have_come_to_the_step_and_the_best_go_on() -> None:
    some = runs(("running", {2: 1.0}), ("running", {}), ("failed", {}), ("queued", {}))
    move = next_move(HALVING, "min", some, 0, set())
    assert move.comparison is None and move.arrived == ["job-0"] and move.missing == ["job-1", "job-3"]
    every = runs(("paused", {2: 3.0}), ("paused", {2: 1.0}), ("failed", {}), ("succeeded", {2: 2.0}))
    made = next_move(HALVING, "min", every, 0, set()).comparison
    assert made is not None and (made.kept, made.stopped) == (("job-1", "job-3"), ("job-0",))
    made = next_move(HALVING, "max", every, 0, set()).comparison
    assert made is not None and (made.kept, made.stopped) == (("job-0", "job-3"), ("job-1",))


def test_stopped_runs_take_no_part_later_and_no_number_comes_last() -> None:
    some = runs(("paused", {2: 1.0, 4: float("nan")}), ("cancelled", {2: 9.0}), ("paused", {2: 2.0, 4: 5.0}))
    made = next_move(HALVING, "min", some, 1, {"job-1"}).comparison
    assert made is not None and (made.kept, made.stopped) == (("job-2",), ("job-0",))
    assert next_move(HALVING, "min", some, 2, {"job-1"}).comparison is None
    assert next_move(HALVING, "min", runs(("failed", {})), 0, set()).comparison is None
