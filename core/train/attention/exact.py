"""Arithmetic in which a token's values are the same bits whatever is computed beside them: `stage.sampler: exact`.

A library chooses how to sum by the shape of a product, so a token that is drawn (one row a slot, keys in a cache) and
the same token in training (all rows of a batch) are usually rounded in different ways. Here shapes are alike:

- matrix products are made of ROWS rows at a time, the last ones beside zeros (`exact_operators`);
- attention is over ROWS queries at a time and a fixed number of keys, those that are not there yet masked;
- log-probabilities are those of training's own kernel, of ROWS rows at a time;
- on a CPU activations are of whole vectors: torch rounds some of them otherwise at the end of a tensor or thread's
  share.

Products and attention of other WIDTHS are used as well where they are found to give rows the same bits on this device
(`_agreeing`): wide ones are quicker in training, narrow ones at the draw.

What else a model does is elementwise, or a sum over the width of one token. Whether all of that holds on a device is
tried (`compute_exactly`), not known; backward passes are computed as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from core.train.attention.packed import refused_argument
from core.train.batch import IGNORE_INDEX
from core.train.kernels.float32 import replaced, torch_kernel
from core.train.loss.chunk import Chunks, HeadOptions
from core.train.loss.head import OutputHead
from core.train.loss.linear_cross_entropy import logprob_chunks, token_logprobs

NAME = "eft_exact"
ROWS = 32
"""Rows of a matrix product, or queries of a call of attention, whose bits count."""
WIDTHS = (4, 8, 16, ROWS, 64, 128, 256)
"""Rows that are tried beside ROWS."""
PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1}
"""Operators that are computed in parts, and the place of the operand whose rows are."""
ACTIVATIONS = ("silu", "sigmoid", "gelu", "rsqrt")
"""Operators that torch's vectors and its code for single numbers round differently on CPUs."""
VECTORS = 64
"""Numbers that are a whole number of torch's widest steps."""
ONE_THREAD = 32768
"""at::internal::GRAIN_SIZE: numbers below which torch uses one thread, and that each thread has at least."""
ONE_THREAD_OF_GELU = 16384
"""Numbers below which its kernel uses one thread; it shares more among all of them."""

_found: dict[tuple[Any, ...], tuple[int, ...]] = {}


def _agreeing(about: tuple[Any, ...], make: Callable[[], Callable[[slice], Tensor]], dim: int) -> tuple[int, ...]:
    """The WIDTHS that give each row the bits that ROWS at a time give it. `make` makes what computes some of the
    last of WIDTHS rows, which are dimension `dim` of the answer; `about` has all that a library may choose by."""
    about = (*about, torch.get_num_threads())
    if about not in _found:
        compute, most = make(), WIDTHS[-1]
        whole = torch.cat([compute(slice(at, at + ROWS)) for at in range(0, most, ROWS)], dim)

        def agrees(width: int) -> bool:
            starts = {0, most - width}  # the first and the last
            return all(torch.equal(compute(slice(at, at + width)), whole.narrow(dim, at, width)) for at in starts)

        _found[about] = tuple(width for width in WIDTHS if width == ROWS or agrees(width))
    return _found[about]


def _width(left: int, widths: tuple[int, ...]) -> int:
    """How many rows to compute next, of so many that are left; beside zeros where these are fewer."""
    wide = next((width for width in widths if width >= left), widths[-1])
    return wide if wide < 2 * left else max((width for width in widths if width <= left), default=wide)


def some_rows(rows: Tensor, dim: int, at: int, width: int) -> Tensor:
    """So many along a dimension from a place on, zeros behind the last."""
    part = rows.narrow(dim, at, min(width, rows.shape[dim] - at))
    if part.shape[dim] < width:
        part = functional.pad(part, (0, 0) * (rows.dim() - 1 - dim) + (0, width - part.shape[dim]))
    return part.contiguous()


def _random(like: Tensor, rows: int | None = None) -> Tensor:
    """Numbers in the place of a tensor's, [rows, ...] or with its shape and strides."""
    source = torch.Generator(like.device).manual_seed(1)
    empty = torch.empty_like(like) if rows is None else like.new_empty((rows, *like.shape[1:]))
    return empty.normal_(generator=source)


@contextmanager
def exact_operators(device: torch.device) -> Iterator[None]:
    """Within, matrix products and activations on the device are made as the module says, and so are the sums of
    products and what was there: an adapter adds its own in place."""
    key = device.type.upper()
    kernels = {"mm": torch_kernel("mm", key), "addmm": torch_kernel("addmm", key)}

    def product(left: Tensor, right: Tensor) -> Tensor:
        return _in_parts(kernels["mm"], None, left, right, {})

    def summed(added: Tensor, left: Tensor, right: Tensor, **more: Any) -> Tensor:
        return _in_parts(kernels["addmm"], added, left, right, more)

    def summed_(into: Tensor, left: Tensor, right: Tensor, **more: Any) -> Tensor:
        return into.copy_(summed(into, left, right, **more))

    of_products: dict[str, Callable[..., Tensor]] = {"mm": product, "addmm": summed, "addmm_": summed_}
    within = {name: of_products[name] for name in PRODUCTS}
    if key == "CPU":
        within |= {name: _in_whole_vectors(torch_kernel(name, key)) for name in ACTIVATIONS}
    with replaced(within, key):
        yield


def _in_whole_vectors(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def activation(values: Tensor, **more: Any) -> Tensor:
        count = values.numel()
        whole = _whole(count, torch.get_num_threads())
        if whole == count and values.is_contiguous():
            return kernel(values, **more)
        return kernel(functional.pad(values.reshape(-1), (0, whole - count)), **more)[:count].view(values.shape)

    return activation


def _whole(count: int, threads: int) -> int:
    """So many numbers, or a few more, of which each thread that torch uses has whole vectors."""
    shares = 1
    while True:
        whole = -(-count // (VECTORS * shares)) * VECTORS * shares
        used = 1 if whole < ONE_THREAD else min(threads, -(-whole // ONE_THREAD))
        if whole >= ONE_THREAD_OF_GELU:
            used = math.lcm(used, threads)
        if shares % used == 0:
            return whole
        shares = math.lcm(shares, used)


def _in_parts(
    kernel: Callable[..., Tensor], added: Tensor | None, left: Tensor, right: Tensor, more: dict[str, Any]
) -> Tensor:
    rows = len(left)
    each = added is not None and added.dim() == 2 and len(added) == rows
    """Whether each row has an addend of its own."""

    def make() -> Callable[[slice], Tensor]:
        one, other = _random(left, WIDTHS[-1]), _random(right)
        if added is None:
            return lambda at: kernel(one[at], other)
        sums = _random(added, WIDTHS[-1] if each else None)
        return lambda at: kernel(sums[at] if each else sums, one[at], other, **more)

    form = None if added is None else (each, added.dtype, added.shape[1:] if each else added.shape)
    about = (left.shape[1], right.shape, right.stride(), left.dtype, left.device, form, *more.items())
    widths = _agreeing(about, make, 0)
    if rows in widths:
        return kernel(*(() if added is None else (added,)), left.contiguous(), right, **more)
    found, at = left.new_empty((rows, right.shape[1])), 0
    while at < rows:
        wide = _width(rows - at, widths)
        beside = () if added is None else (some_rows(added, 0, at, wide) if each else added,)
        found[at : at + wide] = kernel(*beside, some_rows(left, 0, at, wide), right, **more)[: rows - at]
        at += wide
    return found


class LastTokens:
    """Logits behind answers in the making, and the log-probabilities that training has for the tokens drawn from
    them, of one product with the head."""

    def __init__(self, head: OutputHead, temperature: float) -> None:
        self.head, self._options = head, _divided(head, temperature)
        self._chunks: Chunks | None = None

    def products(self, states: Tensor) -> Tensor:
        """The head's, float32 [n, vocabulary], of hidden states [n, hidden]."""
        if self._chunks is None:
            self._chunks = logprob_chunks(states, self.head.weight, self.head.bias, self._options, ROWS)
        chunks = self._chunks
        found = torch.empty((len(states), len(chunks.head)), dtype=chunks.dtype, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(chunks.head.dtype)
            for at in range(0, len(states), ROWS):
                found[at : at + ROWS] = chunks.product(some_rows(states, 0, at, ROWS))[: len(states) - at]
        return found

    def logprobs(self, products: Tensor, labels: Tensor) -> Tensor:
        """Log-probability of the label of each row of `products`, float32 [n]."""
        assert self._chunks is not None
        more = -len(labels) % ROWS
        padded, found = functional.pad(labels, (0, more), value=IGNORE_INDEX), []
        for at in range(0, len(labels), ROWS):
            found.append(torch.empty(ROWS, dtype=self._chunks.dtype, device=labels.device))
            raw = some_rows(products, 0, at, ROWS)
            self._chunks.losses(raw, padded[at : at + ROWS], found[-1], gradient=False, factor=-1.0)
        return torch.cat(found)[: len(labels)]


def _divided(head: OutputHead, temperature: float) -> HeadOptions:
    return replace(head.options, scale=head.options.scale / temperature)


class Exact:
    """For models whose passes are within `exact_operators`, with attention by `attention`."""

    def __init__(self, room: int) -> None:
        """`room`: tokens of the longest prompt with its answer."""
        self.room = -(-room // ROWS) * ROWS
        self._masked: tuple[Any, ...] = ()
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, first: Tensor | None = None
    ) -> Tensor:
        """Causal attention. query [rows, heads, tokens, width], key and value [rows, their heads, at most `room`,
        width]; the answer [rows, tokens, heads, width]. `first`: the place of each row's first query, int64 [rows];
        None: 0."""
        tokens, keys = query.shape[2], max(self.room, key.shape[2])
        if keys > key.shape[2]:
            key, value = (functional.pad(one, (0, 0, 0, keys - one.shape[2])) for one in (key, value))
        shared = query.shape[1] != key.shape[1]

        def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling, enable_gqa=shared
            )

        def make() -> Callable[[slice], Tensor]:
            with torch.no_grad():
                some = _random(query[0].transpose(0, 1), WIDTHS[-1]).transpose(0, 1)[None]
                ones, twos = _random(key[:1]), _random(value[:1])
                mask = self._mask_of(None, 0, WIDTHS[-1], keys, some)
            return lambda at: attended(some[:, :, at].contiguous(), ones, twos, mask[:, :, at])

        about = (query.shape[1], key.shape[1], query.shape[3], keys, query.dtype, query.device, scaling)
        with torch.no_grad():
            widths = _agreeing((*about, torch.is_autocast_enabled(query.device.type)), make, 2)
        parts, at = [], 0
        while at < tokens:
            wide = _width(tokens - at, widths)
            mask = self._mask_of(first, at, wide, keys, query)
            parts.append(attended(some_rows(query, 2, at, wide), key, value, mask.expand(len(query), 1, wide, keys)))
            at += wide
        return torch.cat(parts, dim=2)[:, :, :tokens].transpose(1, 2).contiguous()

    def _mask_of(self, first: Tensor | None, at: int, wide: int, keys: int, like: Tensor) -> Tensor:
        """-inf where a query does not see a key, [rows or 1, 1, wide, keys]. All layers of a pass ask for the same."""
        about = (keys, like.dtype, like.device)
        if not self._masked or self._masked[0] is not first or self._masked[1:] != about:
            self._masked, self._masks = (first, *about), {}
        if (at, wide) not in self._masks:
            start = torch.zeros(1, dtype=torch.int64, device=like.device) if first is None else first
            places = start[:, None] + torch.arange(at, at + wide, device=like.device)
            hidden = torch.arange(keys, device=like.device) > places[:, :, None]
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[at, wide] = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
        return self._masks[at, wide]

    def logprobs(self, hidden: Tensor, head: OutputHead, labels: Tensor, temperature: float) -> Tensor:
        """Log-probability of each label at a temperature, float32 [n], of hidden states [n, hidden]."""
        more = -len(hidden) % ROWS
        found = token_logprobs(
            functional.pad(hidden, (0, 0, 0, more)),
            head.weight,
            functional.pad(labels, (0, more), value=IGNORE_INDEX),
            bias=head.bias,
            options=_divided(head, temperature),
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


@contextmanager
def adapters_at_work(model: nn.Module) -> Iterator[None]:
    """Within, trained weights that start at 0, such as half of an adapter's, have other values: a product with zeros
    hides how it is rounded."""
    zero = [weight for weight in model.parameters() if weight.requires_grad and not weight.any()]
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in zero:
            weight.copy_(torch.randn(weight.shape, generator=source) / 50)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight in zero:
                weight.zero_()
