"""Attention for rows that lie end to end: each row by itself, so that work grows with the rows and not with the line.

transformers keeps packed rows apart with a mask of [line, line] when it sees positions that start anew; nearly all of
that mask, and of the products under it, is outside the rows. Here no mask is made. The model runs with the attention
implementation `eft_packed` (transformers' AttentionInterface), which hands whatever is not packed to SDPA as it is, and
for a packed line calls

- on a GPU in 16 bits, variable-length flash attention (Dao 2023, arXiv:2307.08691), once for all rows: a library's
  that the card's self-test passed, or PyTorch's;
- else SDPA once a row, with `is_causal`.

Where a row is longer than a layer's window or chunk, or a model adds rules of its own to the mask, the mask is made.

Padded rows go the same way where a library is used (`Varlen.padded`): each is as long as the longest, since padding is
on the right and no token sees it.

Rows of an example that begin alike may have that beginning in the line once (`Batch.shared`). Queries are then those of
the line, and keys and values are gathered for each row: what it has in common with the first, and its own. No mask has
that form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from core.train.attention.kept import with_kept
from core.train.attention.positions import known
from core.train.attention.segments import apart, side_by_side, varlen
from core.train.batch import Batch

NAME = "eft_packed"
REFUSED = ("position_bias", "s_aux", "softcap")
"""Arguments of attention that none of our forms of it has."""
_packed: ContextVar[Batch | None] = ContextVar("packed", default=None)
_windows: ContextVar[set[int] | None] = ContextVar("windows", default=None)


class Varlen:
    """Which variable-length flash attention is used in this process; `core.train.attention.probe` tries them."""

    by: str | None = None
    """PyTorch's (`flash_varlen`) or a library; None: none."""
    libraries: tuple[str, ...] = ()
    """Those that passed the device's self-test, best first: to be tried."""
    veto: str | None = None
    """Why PyTorch's is not even tried: the device's self-test."""
    padded: bool = False
    """Whether `by` computes rows that are padded, too."""


@contextmanager
def rows_apart(batch: Batch) -> Iterator[None]:
    """Around the forward pass of a batch: masks are made for it. The backward pass needs nothing of it."""
    token = _packed.set(batch if batch.packed else None)
    try:
        with known(batch):
            yield
    finally:
        _packed.reset(token)


@contextmanager
def windows() -> Iterator[set[int]]:
    """Collects the windows and chunks of layers (in tokens) that forward passes within ask a mask for."""
    found: set[int] = set()
    token = _windows.set(found)
    try:
        yield found
    finally:
        _windows.reset(token)


def register() -> None:
    """Make the name known to transformers; once or often."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(*, local_size: int | None = None, use_vmap: bool = False, **about: Any) -> Tensor | None:
    """transformers' mask interface: None where causal attention inside each row is all that is asked for.
    `local_size`: the layer's window or chunk. `use_vmap`: the model adds a rule of its own."""
    batch = _packed.get()
    within = local_size is None or batch is None or max(batch.lengths) <= local_size
    if (seen := _windows.get()) is not None and local_size is not None:
        seen.add(local_size)
    if batch is not None and within and not use_vmap:
        return None
    if batch is not None and batch.shared is not None:
        raise NotImplementedError("a layer needs a mask, which has no form for rows that share a beginning")
    return sdpa_mask(local_size=local_size, use_vmap=use_vmap, **about)


def refused_argument(more: Mapping[str, Any]) -> str | None:
    """An argument of attention that only a model's own kernels compute; None: there is none."""
    return next((name for name in REFUSED if more.get(name) is not None), None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    segments: tuple[int, ...] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_segments: tuple[int, ...] | None = None,
    key_places: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query [1, heads, tokens, width], key and value with their own heads; the
    answer [1, tokens, heads, width]. `segments`: tokens of each row; absent: not packed. `key_places`: where the keys
    of each row are, if not at the places of its queries, and `key_segments` how many."""
    flash = Varlen.by if not dropout and query.dtype in (torch.bfloat16, torch.float16) else None
    if segments is None or attention_mask is not None:
        if Varlen.padded and flash is not None and attention_mask is None and _whole_rows(module, query, key, more):
            return side_by_side(query, key, value, scaling, flash), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    if (refused := refused_argument(more)) is not None:
        raise NotImplementedError(f"attention with {refused} has no form for packed rows")
    key, value = with_kept(key, value)
    if key_places is not None:
        key, value = key.index_select(2, key_places), value.index_select(2, key_places)
    if flash is not None:
        assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
        assert max_length_q is not None and max_length_k is not None
        lengths = ((cu_seq_lens_q, max_length_q), (cu_seq_lens_k, max_length_k))
        return varlen(query, key, value, *lengths, scaling, flash), None
    return apart(query, key, value, segments, scaling, dropout, key_segments), None


def _whole_rows(module: nn.Module, query: Tensor, key: Tensor, more: Mapping[str, Any]) -> bool:
    """Whether this is causal attention over whole rows, as in training."""
    causal = more.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return bool(causal) and query.shape[2] == key.shape[2] and refused_argument(more) is None
