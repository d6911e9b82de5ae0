"""Packed or not: what transformers asks the device at every forward pass, and we know.

Where a model gets no attention mask, `transformers.masking_utils` looks at the position ids for rows that begin anew,
and asks the device whether there are any: the host waits until the device has done all that is queued. Within `known`
the batch itself says so. Elsewhere (generation, calls from other code) transformers looks as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers import masking_utils

from core.train.batch import Batch

_batch: ContextVar[Batch | None] = ContextVar("batch", default=None)
_ask = masking_utils.find_packed_sequence_indices


@contextmanager
def known(batch: Batch) -> Iterator[None]:
    """Around the forward pass of a batch."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """As transformers': [rows, tokens] with the number of each token's row in its line; None where each line is one."""
    batch = _batch.get()
    if batch is None:
        return _ask(position_ids)
    if not batch.packed or len(batch.lengths) == 1:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
