"""Logits where they are needed, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from core.train.batch import IGNORE_INDEX, Batch


def label_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [label tokens, vocabulary] that predict the labels, and the labels [label tokens], row after row.

    The head runs on the positions before a label only: with masked prompts that is a small share of all, and the
    head is the widest product of a small model. No attention mask is passed: rows are padded on the right, and
    attention is causal, so that no token sees the padding.
    """
    targets = batch.labels[:, 1:]
    width = batch.labels.shape[1]
    row, column = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    with _head_at(model, row * width + column):
        output = model(input_ids=batch.input_ids, use_cache=False)
    return output.logits[0], targets[row, column]


@contextmanager
def _head_at(model: nn.Module, positions: Tensor) -> Iterator[None]:
    """Within, the output head sees only these positions of the flattened batch, as one row. Whatever the model does
    to its logits afterwards (a scale, a soft cap) is elementwise and so stays exact."""

    def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden.flatten(0, 1).index_select(0, positions).unsqueeze(0), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()
