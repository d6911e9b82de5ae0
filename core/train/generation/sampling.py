"""Which token comes next: filters of a distribution, and draws that depend on nothing but their own key.

A draw is a function of (key, position): of two answers with different keys neither knows of the other, and an answer is
drawn with the same numbers whatever else is generated at the time.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
"""Tokens whose probabilities are summed together in a draw; columns of one product in running sums on a GPU."""
TAIL = 8
"""Tokens beyond those of the longest stop string that are decoded to look for one."""

Key = tuple[int, ...]
"""Identity of an answer: seed, rollout, prompt and sample, say."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answers are drawn, and where they end. Filters apply in the order of transformers: temperature, top_k, top_p,
    min_p."""

    max_new_tokens: int
    temperature: float = 0.0
    """0: the most likely token each time."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one's probability are not drawn."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    likeliest: int = 0
    """Likeliest tokens that are told in the place of each token, with their log-probabilities."""


Likeliest = tuple[list[int], list[float]]
"""Tokens, the likeliest first, and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    tokens: list[int]
    """With the token that ended it, if one did."""
    logprobs: list[float]
    """Log-probability of each token under the model at the temperature of the draw (at temperature 0: at 1), before any
    other filter."""
    finished: bool
    """It ended by itself; false: max_new_tokens cut it off."""
    likeliest: list[Likeliest] = field(default_factory=list)
    """In the place of each token, at the temperature of its log-probability."""

    def cut(self, most: int) -> Completion:
        """The answer as it would be with so many tokens at most."""
        if len(self.tokens) <= most:
            return self
        return Completion(self.tokens[:most], self.logprobs[:most], False, self.likeliest[:most])


class Stops:
    """Decides where an answer ends."""

    def __init__(self, params: SamplingParams, decode: Callable[[Sequence[int]], str] | None) -> None:
        """`decode` makes text of tokens; ValueError where stop strings need it and it is None."""
        self.ids, self.strings = frozenset(params.stop_token_ids), params.stop_strings
        if self.strings and decode is None:
            raise ValueError("stop strings need the tokenizer's decode")
        self._decode = decode
        self._tail = max((len(text.encode()) for text in self.strings), default=0) + TAIL

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens of an answer ends it."""
        if tokens[-1] in self.ids:
            return True
        if not self.strings:
            return False
        assert self._decode is not None
        tail = self._decode(tokens[-self._tail :])
        return any(text in tail for text in self.strings)


def uniform(key: Key, position: int) -> float:
    """A number in [0, 1), a function of key and position alone."""
    words = struct.pack(f"<{len(key) + 1}q", *key, position)
    return int(struct.unpack("<I", hashlib.blake2b(words, digest_size=4).digest())[0]) / 2**32


def choose(
    logits: Tensor, keys: Sequence[Key], positions: Sequence[int], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits [rows, vocabulary]: int64 [rows], and its log-probability, float32 [rows].
    `positions`: the place of the token in each answer, from 0."""
    logits = logits.float()
    if params.temperature not in (0, 1):
        logits = logits / params.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if params.temperature > 0:
        numbers = [uniform(key, position) for key, position in zip(keys, positions, strict=True)]
        tokens = drawn(filtered(logprobs, params), torch.tensor(numbers, dtype=torch.float64).to(logits.device))
    else:
        tokens = logits.argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def likeliest_of(logits: Tensor, params: SamplingParams) -> list[Likeliest]:
    """The likeliest tokens of each row of logits [rows, vocabulary], before any filter."""
    scale = params.temperature if params.temperature > 0 else 1.0
    best = torch.log_softmax(logits.float() / scale, dim=-1).topk(params.likeliest)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def filtered(logprobs: Tensor, params: SamplingParams) -> Tensor:
    """Set the log-probabilities of tokens that may not be drawn to -inf. The most likely token always may."""
    if 0 < params.top_k < logprobs.shape[1]:
        least = logprobs.topk(params.top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -math.inf)
    if params.top_p < 1.0:
        ordered, places = logprobs.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().exp()
        before = running_sums(mass) - mass
        out = before >= params.top_p * mass.sum(dim=-1, keepdim=True)
        out[:, 0] = False
        logprobs = logprobs.masked_fill(torch.zeros_like(out).scatter(1, places, out), -math.inf)
    if params.min_p > 0:
        least = logprobs.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        logprobs = logprobs.masked_fill(logprobs < least, -math.inf)
    return logprobs


def drawn(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token of each row by a number in [0, 1): the first at which the running sum of probabilities exceeds the
    number's share of the whole sum. int64 [rows].

    Sums of BLOCK tokens come first, and running sums only within the block that the number falls into: those over a
    whole vocabulary take as long as the rest of a draw together."""
    rows, columns = logprobs.shape
    blocks = functional.pad(logprobs, (0, -columns % BLOCK), value=-math.inf).exp().view(rows, -1, BLOCK)
    ends = running_sums(blocks.sum(dim=-1, dtype=torch.float64))
    target = numbers.unsqueeze(1) * ends[:, -1:]
    block = _first_beyond(ends, target)
    before = ends.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    within = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double()
    return (block * BLOCK + _first_beyond(running_sums(within), target - before)).squeeze(1)


def _first_beyond(sums: Tensor, target: Tensor) -> Tensor:
    """The place in each row of the first sum that exceeds the row's target, int64 [rows, 1]; where none does because of
    a rounding, the last place at which something was added."""
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((sums <= target).sum(dim=-1, keepdim=True), last)


def running_sums(values: Tensor) -> Tensor:
    """Running sums of each row, float64. On a GPU by products with triangles: torch's own cumsum sums in another order
    each time there."""
    return values.cumsum(dim=-1) if values.device.type == "cpu" else by_products(values)


def by_products(values: Tensor) -> Tensor:
    """The running sums of `running_sums` on a GPU."""
    rows, columns = values.shape
    padded = functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    blocks = padded.shape[1]
    within = padded @ torch.ones(BLOCK, BLOCK, dtype=values.dtype, device=values.device).triu()
    before = within[:, :, -1] @ torch.ones(blocks, blocks, dtype=values.dtype, device=values.device).triu(1)
    return (within + before.unsqueeze(-1)).flatten(1)[:, :columns]
