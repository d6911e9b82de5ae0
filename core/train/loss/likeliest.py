"""The likeliest tokens of each place, chunk by chunk: whole logits are never made."""

from __future__ import annotations

import torch
from torch import Tensor

from core.plan import constants
from core.train.loss.chunk import HeadOptions, wide_dtype, wide_product


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    head: Tensor,
    most: int,
    *,
    bias: Tensor | None = None,
    options: HeadOptions,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, float32 [n, most], and ids, int64 [n, most], of the tokens to which each row gives the largest
    ones, from the largest down. Arguments as of `token_logprobs`; the logits are float32 as the product makes them."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    dtype, count = wide_dtype(hidden.dtype), hidden.shape[0]
    rows = chunk_rows or constants.chunk_rows("cpu" if kind == "cpu" else "gpu", head.shape[0], dtype.itemsize)
    values = torch.empty((count, most), dtype=dtype, device=hidden.device)
    ids = torch.empty((count, most), dtype=torch.int64, device=hidden.device)
    with torch.autocast(kind, enabled=False):
        weight = head.to(hidden.dtype).t()
        logits = torch.empty((min(rows, count), head.shape[0]), dtype=dtype, device=hidden.device)
        for start in range(0, count, rows):
            at = slice(start, start + rows)
            some = logits[: len(hidden[at])]
            wide_product(hidden[at], weight, out=some)
            if bias is not None:
                some += bias
            some *= options.scale
            if options.softcap is not None:
                some.div_(options.softcap).tanh_().mul_(options.softcap)
            best = some.topk(most)
            ids[at] = best.indices
            values[at] = best.values - some.logsumexp(dim=1, keepdim=True)
    return values, ids
