"""The generator: answers to many prompts at once, in slots that are given to the next answer as soon as one ends.

A prompt is computed once, however many answers to it are wanted. The tokens are those of the model as training has it:
its modules, adapters, packed weights and precision; nothing is merged or copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from core.train.attention.exact import ROWS, Exact, LastTokens, some_rows
from core.train.generation.products import reads_once
from core.train.generation.sampling import Completion, Key, Likeliest, SamplingParams, Stops, choose, likeliest_of
from core.train.generation.slots import SlotCache, attention_over
from core.train.kernels import native
from core.train.logits import head_at
from core.train.loss.chunk import wide_product
from core.train.loss.head import OutputHead, hidden_states

WIDENED_BYTES = 256 << 20
"""Largest head in float32 that is kept for the time of a call where the device has no product of 16 bits that answers
in float32."""
LEFT = 0.5
"""Share of the slots in use from which on the others are dropped, when nothing waits for them."""


class LastLogits:
    """Logits of the next token, float32: by the head's own product where it is of the known form, never rounded to 16
    bits; else the model's."""

    def __init__(
        self,
        model: nn.Module,
        head: OutputHead | str,
        rows: int,
        exact: LastTokens | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """`rows`: places of most passes. `exact`: makes the products, so that it can say the log-probabilities that
        training has; the head is of the known form then. `apart`: within `exact_operators`, logits of a place do not
        depend on the places beside it."""
        self.model, self.head, self.exact, self.apart = model, head, exact, apart
        self.products: Tensor | None = None
        """Those of the last pass, where they are exact."""
        self._weight: Tensor | None = None
        self._once = False
        """The C kernel multiplies by the head as it is."""
        if isinstance(head, OutputHead):
            where = head.weight.device.type
            autocast = torch.is_autocast_enabled(where)
            self._dtype = torch.get_autocast_dtype(where) if autocast else head.weight.dtype
            self._weight = head.weight.to(self._dtype)
            self._once = not apart and exact is None and reads_once(self._weight, rows)
            if where == "cpu" and 4 * head.weight.numel() <= WIDENED_BYTES and not self._once:
                self._weight = self._weight.float()

    def at(self, places: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[places, vocabulary] of a pass over these ids; `places` are positions of the flattened ids."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        head = self.head
        if not isinstance(head, OutputHead) or self._weight is None:
            with head_at(self.model, places):
                logits: Tensor = self.model(**inputs, use_cache=False).logits
            return logits[0].float()
        states = hidden_states(head, **inputs).flatten(0, 1).index_select(0, places)
        if self.exact is not None:
            self.products = self.exact.products(states)
            found = self.products.clone()
        else:
            with torch.autocast(states.device.type, enabled=False):
                found = self._products(states.to(self._dtype).to(self._weight.dtype), self._weight.t())
        if head.bias is not None:
            found += head.bias.float()
        found *= head.options.scale
        if (cap := head.options.softcap) is not None:
            found = cap * torch.tanh(found / cap)
        return found

    def _products(self, states: Tensor, weight: Tensor) -> Tensor:
        if self.apart and states.dtype is torch.float32 and 4 * weight.numel() <= WIDENED_BYTES:
            return torch.mm(states, weight)  # of as few rows as give their bits (exact.py)
        found = torch.empty((len(states), weight.shape[1]), dtype=torch.float32, device=states.device)
        if self._once:
            native.wide_product(states, weight.t(), found)
            return found
        if not self.apart:
            wide_product(states, weight, out=found)
            return found
        for at in range(0, len(states), ROWS):
            part = found.new_empty((ROWS, weight.shape[1]))
            wide_product(some_rows(states, 0, at, ROWS), weight, out=part)
            found[at : at + ROWS] = part[: len(states) - at]
        return found


@dataclass(frozen=True, slots=True)
class _Last:
    """What is behind a prompt: [vocabulary], and [vocabulary] as LastLogits has it."""

    logits: Tensor
    products: Tensor | None


@dataclass(slots=True)
class _Answer:
    prompt: int
    key: Key
    most: int
    """Tokens at most."""
    params: SamplingParams
    stops: Stops
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    likeliest: list[Likeliest] = field(default_factory=list)

    def add(self, token: int, logprob: float, likeliest: Likeliest | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if likeliest is not None:
            self.likeliest.append(likeliest)
        self.finished = self.stops.ended(self.tokens)


Rows = Callable[[Sequence[int], bool], AbstractContextManager[None]]
"""Around a pass whose rows are of these prompts: over their tokens, or, as the second says, over one token of each."""


class SlotGenerator:
    """Answers in the making; for one call."""

    def __init__(
        self,
        model: nn.Module,
        head: OutputHead | str,
        params: SamplingParams,
        stops: Stops,
        *,
        slots: int,
        prompt_tokens: int,
        device: torch.device,
        exact: Exact | None = None,
        apart: bool = False,
    ) -> None:
        """`prompt_tokens`: tokens of one pass over prompts at most, padding counted; a longer prompt is a pass by
        itself. The model computes without gradients. `exact`: the arithmetic that the model is in, where log-
        probabilities are to be those of training to the bit; the head is of the known form then. `apart`: within
        `exact_operators`, an answer comes to the same bits whatever is generated beside it."""
        last = None
        if exact is not None:
            assert isinstance(head, OutputHead)
            last = LastTokens(head, params.temperature or 1.0)
        self.model, self.logits = model, LastLogits(model, head, slots, last, apart=apart)
        self.params, self.stops = params, stops
        self.slots, self.prompt_tokens, self.device, self.exact = slots, prompt_tokens, device, exact
        self.apart = apart
        self._rows: Rows = lambda prompts, one: nullcontext()
        self.passes = 0
        """Passes over one token of each slot."""

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        between: Callable[[], None],
        most: Sequence[int] | None = None,
        *,
        drawn: Sequence[tuple[SamplingParams, Stops]] | None = None,
        rows: Rows | None = None,
    ) -> list[list[Completion]]:
        """Answer each prompt as often as it has keys. `most`: tokens of an answer to each prompt at most; None: those
        of the parameters. `drawn`: parameters and ends of each prompt's answers, in the place of those of all. `rows`
        is entered around each pass. NoSlotForm, and whatever `between` raises, which is called before each pass."""
        if rows is not None:
            self._rows = rows
        how = [(self.params, self.stops)] * len(prompts) if drawn is None else drawn
        limits = [params.max_new_tokens for params, _ in how] if most is None else most
        answers = [[_Answer(at, key, limits[at], *how[at]) for key in mine] for at, mine in enumerate(keys)]
        waiting = deque(answer for mine in answers for answer in mine)
        room = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        slots = min(self.slots, len(waiting))
        if self.exact is None:
            cache = SlotCache(slots, room, apart=self.apart)
        else:
            cache = SlotCache(slots, max(room, self.exact.room), self.exact.attention)
        owner: list[_Answer | None] = [None] * slots
        held = [-1] * slots
        first: dict[int, _Last] = {}
        with attention_over(cache, self.model):
            while True:
                while waiting and None in owner:
                    between()
                    self._fill(prompts, cache, waiting, owner, held, first)
                live = [slot for slot, answer in enumerate(owner) if answer is not None]
                if not live:
                    break
                if not waiting and len(live) <= LEFT * len(owner):
                    cache.keep(live)
                    owner, held = [owner[slot] for slot in live], [held[slot] for slot in live]
                between()
                self._step(prompts, cache, owner)
        return [[Completion(a.tokens, a.logprobs, a.finished, a.likeliest) for a in mine] for mine in answers]

    def _fill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        waiting: deque[_Answer],
        owner: list[_Answer | None],
        held: list[int],
        first: dict[int, _Last],
    ) -> None:
        """Give free slots to the next answers, and draw their first tokens. `held`: the prompt that each slot has at
        its beginning, also when its answer has ended; `first`: what is behind prompts that more answers may follow."""
        free = deque(slot for slot, answer in enumerate(owner) if answer is None)
        taken: list[tuple[int, _Answer]] = []
        new: dict[int, list[int]] = {}
        widest = 0
        while waiting and free:
            number = waiting[0].prompt
            known = number in first and number in held
            if not known and number not in new:
                wider = max(widest, len(prompts[number]))
                if new and wider * (len(new) + 1) > self.prompt_tokens:
                    break
                widest, new[number] = wider, []
            answer = waiting.popleft()
            if known and (source := held.index(number)) in free:  # the slot of a sibling that has ended
                slot = source
                free.remove(slot)
            else:
                slot = free.popleft()
                if known:
                    cache.copy(source, slot, len(prompts[number]))
            if not known:
                new[number].append(slot)
            taken.append((slot, answer))
            owner[slot] = answer
            if known:
                held[slot] = number
        for slots in new.values():
            for slot in slots:
                held[slot] = -1
        if new:
            self._read(prompts, cache, new, held, first)
        behind = [first[answer.prompt] for _, answer in taken]
        products = [one.products for one in behind if one.products is not None]
        logits = torch.stack([one.logits for one in behind])
        chosen = self._chosen(logits, torch.stack(products) if products else None, [a for _, a in taken])
        for (slot, answer), drawn in zip(taken, chosen, strict=True):
            answer.add(*drawn)
            self._release(owner, slot)
        wanted = {answer.prompt for answer in waiting}
        for number in [number for number in first if number not in wanted]:
            del first[number]

    def _read(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        new: dict[int, list[int]],
        held: list[int],
        first: dict[int, _Last],
    ) -> None:
        """Compute prompts, each once, into their slots."""
        width = max(len(prompts[number]) for number in new)
        ids = torch.zeros((len(new), width), dtype=torch.int64)
        for row, number in enumerate(new):
            ids[row, : len(prompts[number])] = torch.tensor(list(prompts[number]))
        pairs = [(slot, row) for row, slots in enumerate(new.values()) for slot in slots]
        lengths = [len(prompts[number]) for number in new]
        cache.before_prompts([slot for slot, _ in pairs], [row for _, row in pairs], self.device, lengths)
        places = [row * width + len(prompts[number]) - 1 for row, number in enumerate(new)]
        positions = torch.arange(width).expand(len(new), width)
        with self._rows([*new], False):
            logits = self.logits.at(
                torch.tensor(places).to(self.device), ids.to(self.device), positions.to(self.device)
            )
        products = self.logits.products
        for row, (number, slots) in enumerate(new.items()):
            first[number] = _Last(logits[row], None if products is None else products[row])
            for slot in slots:
                held[slot] = number

    def _step(self, prompts: Sequence[Sequence[int]], cache: SlotCache, owner: list[_Answer | None]) -> None:
        """One token more for each answer. A slot that has none any more, when nothing waits, computes beside them."""
        live = {slot: answer for slot, answer in enumerate(owner) if answer is not None}
        there = {slot: len(prompts[answer.prompt]) + len(answer.tokens) - 1 for slot, answer in live.items()}
        lengths = [there.get(slot, max(there.values())) for slot in range(len(owner))]
        current = [live[slot].tokens[-1] if slot in live else 0 for slot in range(len(owner))]
        cache.before_tokens(lengths, self.device)
        ids = torch.tensor(current).unsqueeze(1).to(self.device)
        positions = torch.tensor(lengths).unsqueeze(1).to(self.device)
        somebody = next(iter(live.values())).prompt
        with self._rows([live[slot].prompt if slot in live else somebody for slot in range(len(owner))], True):
            logits = self.logits.at(torch.tensor(list(live)).to(self.device), ids, positions)
        self.passes += 1
        chosen = self._chosen(logits, self.logits.products, list(live.values()))
        for (slot, answer), drawn in zip(live.items(), chosen, strict=True):
            answer.add(*drawn)
            self._release(owner, slot)

    def _chosen(
        self, logits: Tensor, products: Tensor | None, answers: Sequence[_Answer]
    ) -> list[tuple[int, float, Likeliest | None]]:
        found: list[tuple[int, float, Likeliest | None]] = [(0, 0.0, None)] * len(answers)
        alike: dict[SamplingParams, list[int]] = {}
        for row, answer in enumerate(answers):
            alike.setdefault(answer.params, []).append(row)
        for params, rows in alike.items():
            some = logits if len(rows) == len(answers) else logits[rows]
            mine = [answers[row] for row in rows]
            tokens, logprobs = choose(some, [a.key for a in mine], [len(a.tokens) for a in mine], params)
            if products is not None:
                assert self.logits.exact is not None and len(alike) == 1
                logprobs = self.logits.exact.logprobs(products, tokens)
            told = likeliest_of(some, params) if params.likeliest else [None] * len(mine)
            for row, *drawn in zip(rows, tokens.tolist(), logprobs.tolist(), told, strict=True):
                found[row] = (drawn[0], drawn[1], drawn[2])
        return found

    def _release(self, owner: list[_Answer | None], slot: int) -> None:
        answer = owner[slot]
        assert answer is not None
        if answer.finished or len(answer.tokens) >= answer.most:
            owner[slot] = None
