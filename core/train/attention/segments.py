"""The two forms of causal attention over rows that lie end to end, without a mask of the whole line; packed.py gives
them to a model. A row may have more keys than queries: its queries are those of its last tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.train.attention.libraries import varlen_by

TORCH = "flash_varlen"
"""PyTorch's own variable-length kernel, beside the names of libraries."""


def apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[int],
    scaling: float | None,
    dropout: float = 0.0,
    key_segments: Sequence[int] | None = None,
) -> Tensor:
    """SDPA once a row. query [1, heads, tokens, width], key and value with their own heads and tokens; the answer [1,
    tokens, heads, width]. `segments`: queries of each row; `key_segments`: its keys, if there are more."""
    groups = query.shape[1] // key.shape[1]
    shared = groups > 1 and query.device.type == "cpu"  # elsewhere SDPA's fast kernels take as many heads of each
    if groups > 1 and not shared:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    sizes = list(segments)
    of_keys = sizes if key_segments is None else list(key_segments)
    parts = []
    for q, k, v in zip(
        torch.split(query, sizes, 2), torch.split(key, of_keys, 2), torch.split(value, of_keys, 2), strict=True
    ):
        mask = None if q.shape[2] == k.shape[2] else lower_right(q.shape[2], k.shape[2], q.device)
        parts.append(
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None, enable_gqa=shared
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: the last query may look at all keys, each one before at one fewer."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    scaling: float | None,
    by: str = TORCH,
) -> Tensor:
    """The same for all rows in one call, on a GPU in 16 bits: of PyTorch's flash attention, or `by` a library
    (core/hardware/tables/attention.py). `queries`, `keys`: where rows begin among them, int32 [rows + 1], and how many
    the longest row has."""
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    if by != TORCH:
        return varlen_by(by, q, k, v, queries, keys, scaling).unsqueeze(0)
    from torch.nn.attention.varlen import varlen_attn

    groups, about = query.shape[1] // key.shape[1], dict[str, Any]()
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        about["enable_gqa"] = True
    elif groups > 1:  # torch 2.11 and older want as many heads of each
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    where = (queries[0], keys[0], queries[1], keys[1])
    out = varlen_attn(q, k, v, *where, scale=scaling, window_size=(-1, 0), **about)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def side_by_side(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, by: str) -> Tensor:
    """Causal attention of rows of one length, in one call of a library. query [rows, heads, tokens, width], key and
    value with their own heads; the answer [rows, tokens, heads, width]."""
    rows, _, tokens, _ = query.shape
    lengths = (torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens, tokens)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    out = varlen_by(by, q, k, v, lengths, lengths, scaling)
    return out.view(rows, tokens, *out.shape[1:])
