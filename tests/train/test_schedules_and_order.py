"""The schedules are transformers' own to the last bit; the order of rows is a pure function of seed and step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from core.spec.axes.optimizer import Cosine, Linear
from core.train.data.order import BatchOrder
from core.train.optim.schedules import build_schedule


@pytest.mark.parametrize("total", [1, 7, 100])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.5])
@pytest.mark.parametrize(
    ("arm", "theirs"), [(Linear, get_linear_schedule_with_warmup), (Cosine, get_cosine_schedule_with_warmup)]
)
def test_equal_to_transformers(arm: type, theirs: object, ratio: float, total: int) -> None:
    from transformers import TrainingArguments

    warmup = TrainingArguments(output_dir="unused", warmup_steps=ratio, use_cpu=True).get_warmup_steps(total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = theirs(optimizer, num_warmup_steps=warmup, num_training_steps=total)  # type: ignore[operator]
    ours = build_schedule(arm(warmup_ratio=ratio), total)
    for step in range(total + 1):
        assert ours(step) == reference.get_last_lr()[0], step
        optimizer.step()
        reference.step()


def test_each_epoch_reads_every_row_once_in_a_new_order() -> None:
    order = BatchOrder(10, batch_size=3, accumulation=3, seed=1)
    assert order.steps_per_epoch == 2
    epochs = [[row for step in (2 * e, 2 * e + 1) for rows in order.window(step) for row in rows] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(order.window(step)) for step in range(2)] == [3, 1]
    assert BatchOrder(10, batch_size=3, accumulation=3, seed=1).window(3) == order.window(3)
    assert BatchOrder(10, batch_size=3, accumulation=3, seed=2).window(3) != order.window(3)


def test_steps_of_fractional_epochs() -> None:
    order = BatchOrder(10, batch_size=2, accumulation=1, seed=1)
    assert order.total_steps(0.5, None) == 3
    assert order.total_steps(2, None) == 10
    assert order.total_steps(2, 4) == 4
