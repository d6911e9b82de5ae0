"""Keys and values of answers in the making: one tensor a layer with a slot for each answer, allocated once.

The model runs with the attention implementation `eft_slots` (transformers' AttentionInterface), which writes the keys
and values of the tokens at hand into their slots and attends over what is there. Nothing is padded on the left, no
mask of the whole is made, and transformers' caches are not used. Only attention over all tokens before has this form:
a layer with a shorter window, or rules of its own for the mask, raises NoSlotForm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from core.train.attention.packed import refused_argument

NAME = "eft_slots"

KEYS = 64
"""Keys that a row attends over are a multiple of so many, masked behind its own, where its bits are to be those that it
has alone."""

Attention = Callable[[Tensor, Tensor, Tensor, float | None, Tensor | None], Tensor]
"""Causal attention: `Exact.attention` (exact.py)."""


class NoSlotForm(Exception):
    """The model's attention has no form for slots."""


class SlotCache:
    """Keys and values [slots, heads, room, width] of each layer, and what the pass at hand does with them."""

    def __init__(self, slots: int, room: int, exact: Attention | None = None, *, apart: bool = False) -> None:
        """`exact`: computes the attention in place of SDPA over what is there. `apart`: the attention of a row does not
        depend on the rows beside it."""
        self.slots, self.room, self.exact, self.apart = slots, room, exact, apart
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.windows: set[int] = set()
        """Tokens that layers with a window or chunk look back, as far as passes have asked for a mask."""
        self._to: Tensor | None = None
        self._from: Tensor | None = None
        self._rows: Tensor | None = None
        self._at: Tensor | None = None
        self._allowed: Tensor | None = None
        self._most = 0
        self._prompts: Sequence[int] = ()
        self._groups: list[tuple[Tensor | slice, int, Tensor]] = []

    def before_prompts(
        self, slots: Sequence[int], rows: Sequence[int], device: torch.device, lengths: Sequence[int] = ()
    ) -> None:
        """The next pass is over whole prompts, padded on the right: slot slots[i] gets the prompt of row rows[i].
        `lengths`: tokens of each row, which only rows that are kept apart need."""
        self._prompts = lengths
        self._to = torch.tensor(list(slots), device=device)
        self._from = torch.tensor(list(rows), device=device)

    def before_tokens(self, lengths: Sequence[int], device: torch.device) -> None:
        """The next pass is over one token of each of the first slots, the next after so many that are there."""
        self._to, self._rows = None, torch.arange(len(lengths), device=device)
        self._at = torch.tensor(list(lengths), device=device)
        self._most = max(lengths) + 1
        self._allowed = None
        if self.apart:
            self._groups = list(_groups(lengths, device))
        elif min(lengths) < max(lengths):
            there = torch.arange(self._most, device=device)[None] <= self._at[:, None]
            self._allowed = there[:, None, None, :]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a slot to another."""
        for both in self.layers.values():
            for tensor in both:
                tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def widen(self, room: int) -> None:
        """Give each slot room for more tokens; what is there stays."""
        for layer, both in self.layers.items():
            keys, values = (nn.functional.pad(one, (0, 0, 0, room - self.room)) for one in both)
            self.layers[layer] = (keys, values)
        self.room = room

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these slots alone, in this order."""
        for layer, (keys, values) in self.layers.items():
            at = torch.tensor(list(slots), device=keys.device)
            self.layers[layer] = (keys.index_select(0, at), values.index_select(0, at))
        self.slots = len(slots)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attention of the pass at hand: [rows, tokens, heads, width]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        if layer not in self.layers:
            self.layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self.layers[layer]
        groups = query.shape[1] // key.shape[1]
        if self._to is not None:
            assert self._from is not None
            tokens = key.shape[2]
            keys[self._to, :, :tokens] = key.index_select(0, self._from)
            values[self._to, :, :tokens] = value.index_select(0, self._from)
            if self.exact is not None:
                return self.exact(query, key, value, scaling, None)
            if self.apart:
                return self._prompts_apart(query, key, value, scaling)
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, scale=scaling, is_causal=tokens > 1, enable_gqa=groups > 1
            )
            return out.transpose(1, 2).contiguous()
        rows, heads, _, _ = query.shape
        keys[self._rows, :, self._at] = key[:, :, 0]
        values[self._rows, :, self._at] = value[:, :, 0]
        if self.exact is not None:
            return self.exact(query, keys[:rows], values[:rows], scaling, self._at)
        # The heads that share keys are rows of one product.
        shared = query.view(rows, heads // groups, groups, query.shape[3])
        if self.apart:
            return self._tokens_apart(shared, keys, values, scaling).reshape(rows, 1, heads, query.shape[3])
        out = nn.functional.scaled_dot_product_attention(
            shared,
            keys[:rows, :, : self._most],
            values[:rows, :, : self._most],
            attn_mask=self._allowed,
            scale=scaling,
        )
        return out.reshape(rows, 1, heads, out.shape[-1])

    def _prompts_apart(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        shared = query.shape[1] != key.shape[1]
        found = query.new_zeros(query.transpose(1, 2).shape)
        for row, tokens in enumerate(self._prompts):
            asked, keys, values = (one[row : row + 1, :, :tokens].contiguous() for one in (query, key, value))
            out = nn.functional.scaled_dot_product_attention(
                asked, keys, values, scale=scaling, is_causal=tokens > 1, enable_gqa=shared
            )
            found[row, :tokens] = out[0].transpose(0, 1)
        return found

    def _tokens_apart(self, shared: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        found = torch.empty_like(shared)
        for rows, most, allowed in self._groups:
            found[rows] = nn.functional.scaled_dot_product_attention(
                shared[rows], keys[rows, :, :most], values[rows, :, :most], attn_mask=allowed, scale=scaling
            )
        return found

    def _empty(self, like: Tensor) -> Tensor:
        room = _rounded(self.room) if self.apart else self.room
        return like.new_zeros((self.slots, like.shape[1], room, like.shape[3]))


def _rounded(tokens: int) -> int:
    return -(-tokens // KEYS) * KEYS


def _groups(lengths: Sequence[int], device: torch.device) -> Iterator[tuple[Tensor | slice, int, Tensor]]:
    """Rows that attend over as many keys: which, how many keys, and the ones that each row sees."""
    alike: dict[int, list[int]] = {}
    for row, there in enumerate(lengths):
        alike.setdefault(_rounded(there + 1), []).append(row)
    for most, rows in alike.items():
        at = torch.tensor([lengths[row] for row in rows], device=device)
        allowed = torch.arange(most, device=device)[None] <= at[:, None]
        which = slice(0, len(rows)) if len(rows) == len(lengths) else torch.tensor(rows, device=device)
        yield which, most, allowed[:, None, None, :]


_cache: ContextVar[SlotCache | None] = ContextVar("slots", default=None)


@contextmanager
def attention_over(cache: SlotCache, model: nn.Module) -> Iterator[None]:
    """Around forward passes of a model: its attention is that over the slots. NoSlotForm where that cannot be set."""
    with slot_attention(model), attending(cache):
        yield


@contextmanager
def slot_attention(model: nn.Module) -> Iterator[None]:
    """Let a model attend over slots; `attending` says over which. NoSlotForm where that cannot be set."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    before = base.config._attn_implementation
    if not base._can_set_attn_implementation():
        raise NoSlotForm("its attention cannot be replaced")
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@contextmanager
def attending(cache: SlotCache) -> Iterator[None]:
    """Around passes within `slot_attention`."""
    token = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(token)


def mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> None:
    """transformers' mask interface. `local_size`: the layer's window or chunk. `use_vmap`: the model adds a rule of its
    own. NoSlotForm."""
    cache = _cache.get()
    if use_vmap:
        raise NoSlotForm("it has rules of its own for which tokens see one another")
    if local_size is not None and cache is not None:
        cache.windows.add(local_size)
        if cache.room > local_size:
            raise NoSlotForm(f"a layer looks back {local_size} tokens only")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; see SlotCache.attend. NoSlotForm."""
    refused = refused_argument(more)
    cache = _cache.get()
    if refused is not None or attention_mask is not None or cache is None:
        raise NoSlotForm(f"its attention takes {refused or 'a mask of its own'}")
    return cache.attend(module, query, key, value, scaling), None
