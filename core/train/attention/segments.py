"""The two forms of causal attention over rows that lie end to end, without a mask; packed.py gives them to a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def apart(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[int], scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """SDPA once a row. query [1, heads, tokens, width], key and value with their own heads; the answer [1, tokens,
    heads, width]. `segments`: tokens of each row."""
    groups = query.shape[1] // key.shape[1]
    shared = groups > 1 and query.device.type == "cpu"  # elsewhere SDPA's fast kernels take as many heads of each
    if groups > 1 and not shared:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    sizes = list(segments)
    parts = [
        nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=shared
        )
        for q, k, v in zip(*(torch.split(each, sizes, 2) for each in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def varlen(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """The same for all rows in one call of PyTorch's flash attention, on a GPU in 16 bits. `boundaries` int32
    [rows + 1]: where rows begin; `longest`: tokens of the longest."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)
