"""Answers that are computed in one batch. New ones join between two passes, and one that has ended leaves at once."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.train.generation.generator import LastLogits
from core.train.generation.sampling import SamplingParams, choose
from core.train.generation.slots import SlotCache, attending
from core.train.serving.answer import LiveAnswer
from core.train.serving.logprobs import likeliest

PROMPT_TOKENS = 8192
"""Tokens of one pass over prompts, padding counted; a longer prompt is a pass by itself."""
ROOM = 256
"""Slots have room for a multiple of so many tokens."""

Adapters = Callable[[Sequence[str | None]], AbstractContextManager[Any]]
"""Let the model compute each row of the next passes with the adapter of this name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one pass adds to an answer."""

    answer: LiveAnswer
    text: str
    logprobs: dict[str, Any] | None


class Lane:
    """Answers whose adapters can be computed in one pass. The model computes without gradients."""

    def __init__(self, logits: LastLogits, adapters: Adapters, slots: int, device: torch.device) -> None:
        self._logits, self._adapters, self._slots, self._device = logits, adapters, slots, device
        self._cache: SlotCache | None = None
        self._live: list[LiveAnswer] = []
        """By their slots: the first ones, without a gap."""
        self._waiting: deque[LiveAnswer] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._live or self._waiting)

    @property
    def adapters(self) -> set[str | None]:
        """Names of the adapters in use."""
        return {answer.adapter for answer in (*self._live, *self._waiting)}

    def join(self, answer: LiveAnswer) -> None:
        self._waiting.append(answer)

    def leave(self, request: str) -> None:
        """Drop the answers to a request."""
        self._waiting = deque(answer for answer in self._waiting if answer.request != request)
        for slot in reversed(range(len(self._live))):
            if self._live[slot].request == request:
                self._release(slot)

    def step(self) -> Iterator[Piece]:
        """Compute waiting prompts for which there is a slot, then one token more of each answer."""
        while self._waiting and len(self._live) < self._slots:
            yield from self._read()
        if self._live:
            yield from self._write()
        if not self.busy:
            self._cache = None  # its memory is free until something is asked again

    def _read(self) -> Iterator[Piece]:
        """Compute prompts into free slots, each prompt of a request once."""
        rows: list[LiveAnswer] = []
        pairs: list[tuple[int, int]] = []
        first = len(self._live)
        widest = 0
        while self._waiting and len(self._live) < self._slots:
            answer = self._waiting[0]
            known = bool(rows) and rows[-1].request == answer.request and rows[-1].prompt is answer.prompt
            if not known:
                wider = max(widest, len(answer.prompt))
                if rows and wider * (len(rows) + 1) > PROMPT_TOKENS:
                    break
                widest = wider
                rows.append(answer)
            pairs.append((len(self._live), len(rows) - 1))
            self._live.append(self._waiting.popleft())
        cache = self._roomy(max(answer.room for answer in self._live[first:]))
        ids = torch.zeros((len(rows), widest), dtype=torch.int64)
        for row, answer in enumerate(rows):
            ids[row, : len(answer.prompt)] = torch.tensor(list(answer.prompt))
        cache.before_prompts([slot for slot, _ in pairs], [row for _, row in pairs], self._device)
        places = torch.tensor([row * widest + len(answer.prompt) - 1 for row, answer in enumerate(rows)])
        positions = torch.arange(widest).expand(len(rows), widest)
        with attending(cache), self._adapters([answer.adapter for answer in rows]):
            logits = self._logits.at(places.to(self._device), ids.to(self._device), positions.to(self._device))
        taken = torch.tensor([row for _, row in pairs], device=logits.device)
        yield from self._add(first, logits.index_select(0, taken))

    def _write(self) -> Iterator[Piece]:
        cache = self._cache
        assert cache is not None
        lengths = [answer.cached for answer in self._live]
        cache.before_tokens(lengths, self._device)
        ids = torch.tensor([[answer.tokens[-1]] for answer in self._live]).to(self._device)
        positions = torch.tensor(lengths).unsqueeze(1).to(self._device)
        with attending(cache), self._adapters([answer.adapter for answer in self._live]):
            logits = self._logits.at(torch.arange(len(lengths), device=self._device), ids, positions)
        yield from self._add(0, logits)

    def _add(self, first: int, logits: Tensor) -> Iterator[Piece]:
        """Draw the next token of the answers from slot `first` on."""
        answers = self._live[first:]
        tokens = _draw(answers, logits)
        logprobs = _logprobs(answers, logits, tokens)
        pieces = [
            Piece(answer, answer.add(token), told)
            for answer, token, told in zip(answers, tokens, logprobs, strict=True)
        ]
        for slot in reversed(range(first, len(self._live))):
            if self._live[slot].finish_reason is not None:
                self._release(slot)
        yield from pieces

    def _release(self, slot: int) -> None:
        last = self._live.pop()
        if slot < len(self._live):
            assert self._cache is not None
            self._cache.copy(len(self._live), slot, last.cached)
            self._live[slot] = last

    def _roomy(self, tokens: int) -> SlotCache:
        """The cache, with room for so many tokens in each slot."""
        room = -(-tokens // ROOM) * ROOM
        if self._cache is None:
            self._cache = SlotCache(self._slots, room)
        elif self._cache.room < room:
            self._cache.widen(room)
        return self._cache


def key_of(seed: int, index: int) -> tuple[int, ...]:
    """Identity of a choice's draws: the same for the same seed and number, whatever else is computed at the time."""
    return (seed, index)


def adapter_name(folder: str) -> str:
    """Name of the adapter of a folder."""
    return hashlib.sha256(folder.encode()).hexdigest()[:24]


def _draw(answers: Sequence[LiveAnswer], logits: Tensor) -> list[int]:
    tokens = [0] * len(answers)
    alike: dict[SamplingParams, list[int]] = {}
    for row, answer in enumerate(answers):
        alike.setdefault(answer.params, []).append(row)
    for params, rows in alike.items():
        some = logits if len(rows) == len(answers) else logits[rows]
        keys = [answers[row].key for row in rows]
        drawn, _ = choose(some, keys, [len(answers[row].tokens) for row in rows], params)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = int(token)
    return tokens


def _logprobs(answers: Sequence[LiveAnswer], logits: Tensor, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
    """Token, log-probability under the model at temperature 1, and the most likely ones; None where not asked."""
    found: list[dict[str, Any] | None] = [None] * len(answers)
    for row, answer in enumerate(answers):
        if answer.top_logprobs is None:
            continue
        found[row] = likeliest(torch.log_softmax(logits[row].float(), dim=-1), tokens[row], answer.top_logprobs)
    return found
