"""Which checkpoints stay, and what a job that begins with one may change: pure rules."""

from __future__ import annotations

from typing import Any

import pytest

from core.jobs.admission.branches import faults_of
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.train.checkpoint.keep import HOUR, Written, kept

FOUND = [Written(f"s{step}", step, at) for step, at in ((9, 3.5), (8, 3.2), (6, 3.1), (4, 1.9), (3, 1.5), (1, 0.1))]
HOURS = [Written(one.name, one.step, one.at * HOUR) for one in FOUND]


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ({"last": 2}, "s9 s8"),
        ({"last": 9}, "s9 s8 s6 s4 s3 s1"),
        ({"last": 1, "best_steps": [7, 3, 9, 1], "best": 2}, "s9 s3"),
        ({"last": 1, "best_steps": [3, 1], "best": 1}, "s9 s3"),
        ({"last": 1, "best_steps": [3, 1]}, "s9"),
        ({"last": 1, "hourly": 1}, "s9"),
        ({"last": 1, "hourly": 2}, "s9 s4"),
        ({"last": 2, "hourly": 9}, "s9 s8 s4 s1"),
    ],
)
def test_rules_of_what_stays(rule: dict[str, Any], names: str) -> None:
    assert kept(HOURS, **rule) == set(names.split())


BEFORE: dict[str, Any] = {"model": "a/b", "data": "file-01kar3v8x5m2h6n9qst4wyz0bc", "method": {"r": 8}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data": "file-01kar3v8x5m2h6n9qst4wyz0bd"}, None),
        ({"optimizer": {"learning_rate": 1e-5}}, None),
        ({"schedule": "cosine", "training": {"max_steps": 9}}, None),
        ({"name": "other", "priority": 3, "checkpoint": {"save_steps": 7}, "export": ["merged"]}, None),
        ({"method": {"r": 4}}, "method.r"),
        ({"model": "a/c"}, "model.id"),
        ({"optimizer": "lion"}, "optimizer.type"),
        ({"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay"),
        ({"training": {"precision": "fp32"}}, "training.precision"),
        ({"resources": {"gpus": 2}}, "resources.gpus"),
    ],
)
def test_what_a_branch_may_change(change: dict[str, Any], field: str | None) -> None:
    faults = faults_of(resolve(parse_job(BEFORE)), resolve(parse_job(BEFORE | change)))
    assert [fault.code for fault in faults] == ["branch_differs"] * len(faults)
    assert (field is None and not faults) or field in [fault.field for fault in faults]


def test_rules_by_evaluations_need_some() -> None:
    from core.errors import SpecError

    for name in ("keep_best", "metric_bound"):
        with pytest.raises(SpecError, match=f"checkpoint.{name}"):
            parse_job(BEFORE | {"checkpoint": {name: 1}})
