"""Arithmetic in which a token's values are the same bits whatever is computed beside them: `stage.sampler: exact`.

A library chooses how to sum by the shape of a product, so a token that is drawn (one row a slot, keys in a cache) and
the same token in training (all rows of a batch) are usually rounded in different ways. Here shapes are the same:

- matrix products are made of ROWS rows at a time, the last ones beside zeros (`Products`);
- attention is over QUERIES queries at a time and a fixed number of keys, those that are not there yet masked;
- log-probabilities are those of training's own kernel, of ROWS rows at a time.

What else a model does is elementwise, or a sum over the width of one token. Whether that holds on a device is tried
(`prepare`), not known; backward passes are computed as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from core.train.attention.packed import refused_argument
from core.train.batch import IGNORE_INDEX
from core.train.loss.head import OutputHead
from core.train.loss.linear_cross_entropy import token_logprobs

NAME = "eft_exact"
ROWS = 32
"""Rows of a matrix product."""
QUERIES = 32
"""Queries of a call of attention."""

_aten: Any = torch.ops.aten
PRODUCTS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.mm.dtype: 0,
    _aten.mm.dtype_out: 0,
    _aten.addmm.default: 1,
    _aten.addmm_.default: 1,
}
"""Operators that are cut into parts, and the place of the operand whose rows are."""
PLAIN = {
    _aten.mm.out: _aten.mm.default,
    _aten.mm.dtype_out: _aten.mm.dtype,
    _aten.addmm_.default: _aten.addmm.default,
}
"""The operators that make the parts of those that write into a tensor."""


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, matrix products are made of ROWS rows at a time, and so are the sums of products and what was there: an
    adapter adds its own in place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = PRODUCTS.get(func)
        if place is None or args[place].shape[0] == ROWS:
            return func(*args, **kwargs)
        left: Tensor = args[place]
        into: Tensor | None = args[0] if func is _aten.addmm_.default else kwargs.get("out")
        more = {name: value for name, value in kwargs.items() if name != "out"}
        added: Sequence[Tensor] | None = [args[0]] * -(-len(left) // ROWS) if place else None
        if added and args[0].dim() == 2 and args[0].shape[0] == len(left):
            added = _parts(args[0])
        plain = PLAIN.get(func, func)
        parts = [
            plain(*([] if added is None else [added[number]]), part, *args[place + 1 :], **more)
            for number, part in enumerate(_parts(left))
        ]
        found = parts[0][: len(left)] if len(parts) == 1 else torch.cat(parts)[: len(left)]
        return found.contiguous() if into is None else into.copy_(found)


def _parts(rows: Tensor) -> Sequence[Tensor]:
    """ROWS rows at a time, the last ones above zeros."""
    return torch.split(functional.pad(rows, (0, 0, 0, -len(rows) % ROWS)).contiguous(), ROWS)


class Exact:
    """For models whose passes are within `Products`, with attention by `attention`."""

    def __init__(self, room: int) -> None:
        """`room`: tokens of the longest prompt with its answer."""
        self.room = -(-room // QUERIES) * QUERIES

    def products(self) -> Products:
        return Products()  # type: ignore[no-untyped-call]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, first: Tensor | None = None
    ) -> Tensor:
        """Causal attention. query [rows, heads, tokens, width], key and value [rows, their heads, at most `room`,
        width]; the answer [rows, tokens, heads, width]. `first`: the place of each row's first query, int64 [rows];
        None: 0."""
        tokens, keys = query.shape[2], max(self.room, key.shape[2])
        if keys > key.shape[2]:
            key, value = (functional.pad(one, (0, 0, 0, keys - one.shape[2])) for one in (key, value))
        if tokens % QUERIES:
            query = functional.pad(query, (0, 0, 0, -tokens % QUERIES))
        start = torch.zeros(1, dtype=torch.int64, device=query.device) if first is None else first
        there = torch.arange(keys, device=query.device)
        parts = []
        for at in range(0, query.shape[2], QUERIES):
            places = start[:, None] + torch.arange(at, at + QUERIES, device=query.device)
            seen = (there <= places[:, :, None]).unsqueeze(1).expand(query.shape[0], 1, QUERIES, keys)
            parts.append(
                functional.scaled_dot_product_attention(
                    query[:, :, at : at + QUERIES].contiguous(), key, value, attn_mask=seen, scale=scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )  # fmt: skip
        return torch.cat(parts, dim=2)[:, :, :tokens].transpose(1, 2).contiguous()

    def logprobs(self, hidden: Tensor, head: OutputHead, labels: Tensor, temperature: float) -> Tensor:
        """Log-probability of each label at a temperature, float32 [n], of hidden states [n, hidden]."""
        more = -len(hidden) % ROWS
        found = token_logprobs(
            functional.pad(hidden, (0, 0, 0, more)),
            head.weight,
            functional.pad(labels, (0, more), value=IGNORE_INDEX),
            bias=head.bias,
            options=replace(head.options, scale=head.options.scale / temperature),
            chunk_rows=ROWS,
        )
        return found[: len(hidden)]

    def install(self, model: nn.Module) -> None:
        """Have the model attend by `attention`. NotImplementedError where that cannot be set; passes raise it where a
        layer asks for something that has no form here."""
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        if not base._can_set_attn_implementation():
            raise NotImplementedError("its attention cannot be replaced")
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, self._mask)
        base.set_attn_implementation(NAME)

    def _mask(self, *, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> None:
        """transformers' mask interface. `local_size`: the layer's window or chunk. `use_vmap`: the model adds a rule of
        its own."""
        if use_vmap:
            raise NotImplementedError("it has rules of its own for which tokens see one another")
        if local_size is not None and self.room > local_size:
            raise NotImplementedError(f"a layer looks back {local_size} tokens only")

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface."""
        refused = refused_argument(more)
        if refused is not None or attention_mask is not None:
            raise NotImplementedError(f"its attention takes {refused or 'a mask of its own'}")
        return self.attention(query, key, value, scaling), None
