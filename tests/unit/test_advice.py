"""What is told of a job though nothing is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from core.plan.advice import FEW_STEPS, of_losses, of_rate, of_steps, of_training_losses
from core.spec.load import parse_job
from core.spec.resolve import resolve


def job(**axes: Any) -> Any:
    return resolve(parse_job({"model": "a/b", "data": "file-01kar3v8x5m2h6n9qst4wyz0bc", **axes}))


def test_few_steps_are_told_with_their_reason_and_the_way_out() -> None:
    assert not of_steps(job(), FEW_STEPS)
    (few,) = of_steps(job(batching="packed"), FEW_STEPS - 1, estimated=True)
    assert (few.code, few.field) == ("few_steps", "batching.tokens_per_batch")
    assert "about 19 optimizer steps" in few.message and "8192 tokens" in few.message
    assert "`training.num_train_epochs`" in few.message
    (few,) = of_steps(job(training={"gradient_accumulation_steps": 4}), 5)
    assert few.field == "training.per_device_train_batch_size" and "32 rows" in few.message
    (few,) = of_steps(job(training={"max_steps": 4}), 4)
    assert few.field == "training.max_steps" and "raise it" in few.message


def test_a_warm_up_of_most_steps_is_told() -> None:
    long = job(schedule={"type": "cosine", "warmup_ratio": 0.6})
    assert [one.code for one in of_steps(long, 100)] == ["long_warmup"]
    assert not of_steps(job(schedule={"type": "cosine", "warmup_ratio": 0.5}), 100)
    assert [one.code for one in of_steps(job(), 1)] == ["few_steps", "long_warmup"]  # rounded up, one is all


@pytest.mark.parametrize(
    ("method", "rate", "told"),
    [
        ("full", 2e-5, False),
        ("full", 1e-6, False),
        ("full", None, False),
        ("lora", 1e-3, False),
        ("lora", 2e-4, False),
        ("lora", 2e-5, True),
        ("qlora", 2e-5, True),
    ],
)
def test_a_learning_rate_of_another_method(method: str, rate: float | None, told: bool) -> None:
    found = of_rate(job(method="auto", optimizer={"learning_rate": rate}), method, " on vm/cpu")
    assert (found is not None) == told
    if found is not None:
        assert f"{rate:g}" in found.message and "on vm/cpu" in found.message
        assert f"`{method}`" in found.message


def test_a_loss_that_rose() -> None:
    assert of_losses(5.57, 11.0) is None and of_losses(None, 9.0) is None and of_losses(1.0, None) is None
    found = of_losses(5.57, 31430.0)
    assert found is not None and "from 5.57 to 3.143e+04" in found.message


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([2.0] * 5 + [9.0] * 5, True),
        ([2.0] * 5 + [9.0] * 4, False),  # too early to say
        ([2.0] * 5 + [3.9] * 5, False),  # twice the beginning is not reached
        ([0.01] * 5 + [0.9] * 5, False),  # many times the beginning, and still small
        ([2.0] * 5 + [1.0, 1.0, 30.0, 1.0, 1.0] * 3, True),
        ([2.0] * 5 + [None, 9.0, None, 9.0, None], True),  # steps that fp16 skipped have none
        ([None] * 10, False),
        ([5.0, 240.0, 5000.0, 3000.0, 4000.0, 800.0, 2000.0, 1500.0, 700.0, 1900.0], True),  # from the first step on
        ([25.0] * 10, False),  # as DPO's `ipo` begins
        ([0.5, 3.0, 3.0, 3.0, 3.0] * 2, False),
    ],
)
def test_a_training_loss_that_rose(losses: list[float | None], told: bool) -> None:
    found = of_training_losses([{"step": at} | ({} if one is None else {"loss": one}) for at, one in enumerate(losses)])
    assert (found is not None) == told
    assert found is None or "the training loss rose from" in found.message
