"""Answers to several operations in one batch, each row with the adapter of its operation. Every answer has the bits
that it has alone.

The base's products are of all rows, made as `exact_operators` makes them; PEFT adds those of each adapter to its rows.
Whether an adapter can be computed so, and to the same bits, is tried with the model on the device; where it cannot, its
operations are generated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from core.plan.constants import PROMPT_TOKENS
from core.train.attention.exact import adapters_at_work, exact_operators
from core.train.generation.generator import SlotGenerator
from core.train.generation.sampling import Completion, Key, SamplingParams, Stops
from core.train.kernels.interface import rows_alike
from core.train.session.adapter import SessionAdapter
from core.train.session.resident import ResidentBase

PROMPTS, SAMPLES, TOKENS = (37, 3, 70), 2, 4
"""Tokens of the prompts of a trial, answers to each, and tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one operation asks of the generator."""

    prompts: Sequence[Sequence[int]]
    keys: Sequence[Sequence[Key]]
    params: SamplingParams
    adapter: SessionAdapter | None
    """None: the base alone."""

    @property
    def answers(self) -> int:
        return sum(map(len, self.keys))

    @property
    def room(self) -> int:
        return max(map(len, self.prompts)) + self.params.max_new_tokens


class SharedSampler:
    """Generates on a base, for all of its sessions."""

    def __init__(self, base: ResidentBase, slots: int, between: Callable[[], None]) -> None:
        """`slots`: answers at once. `between` runs before each pass, and may raise."""
        self.base, self.slots, self.between = base, slots, between
        self._tried: dict[str, bool] = {}
        """By the form of an adapter, whether its answers have their bits beside others."""

    def mixes(self, draw: Draw) -> bool:
        """Whether an operation is generated in a batch. A function of the operation and the base, so that it comes to
        the same alone and beside others."""
        base = self.base
        if base.whole or base.engine.without_slots(draw.room) is not None:
            return False
        form = "" if draw.adapter is None else draw.adapter.method.model_dump_json()
        if form not in self._tried:
            self._tried[form] = self._try(draw.adapter)
        return self._tried[form]

    def answer(self, draws: Sequence[Draw]) -> list[list[list[Completion]]]:
        """The answers to each operation, of which each `mixes`."""
        decode = self.base.tokenizer.decode
        prompts = [prompt for draw in draws for prompt in draw.prompts]
        keys = [mine for draw in draws for mine in draw.keys]
        drawn = [(draw.params, Stops(draw.params, decode)) for draw in draws for _ in draw.prompts]
        names = [None if draw.adapter is None else draw.adapter.key for draw in draws for _ in draw.prompts]
        found = self._complete(prompts, keys, drawn, names, self.slots)
        return [[found.pop(0) for _ in draw.prompts] for draw in draws]

    def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        drawn: Sequence[tuple[SamplingParams, Stops]],
        names: Sequence[str | None],
        slots: int,
    ) -> list[list[Completion]]:
        engine, device = self.base.engine, self.base.placement.device
        with engine.inference() as model, exact_operators(device), _Adapters(self.base) as adapters:
            generator = SlotGenerator(
                model,
                engine.policy.head(),
                *drawn[0],
                slots=slots,
                prompt_tokens=PROMPT_TOKENS,
                device=device,
                apart=True,
            )
            return generator.complete(
                prompts,
                keys,
                self.between,
                drawn=drawn,
                rows=lambda places, one: adapters.of([names[at] for at in places], one),
            )

    def _try(self, adapter: SessionAdapter | None) -> bool:
        """Whether answers beside those of the base are those that each has alone. DoRA, layers that see tokens of all
        rows in one list, and libraries that round by what else is computed are found here."""
        if adapter is not None:
            if isinstance(adapter.engine.policy.head(), str):
                return False
            adapter.begin()
        name, vocabulary = None if adapter is None else adapter.key, self.base.vocabulary
        prompts = [[(at * 7919 + 31 * n + 11) % vocabulary for at in range(tokens)] for n, tokens in enumerate(PROMPTS)]
        keys = [[(0, n, sample) for sample in range(SAMPLES)] for n in range(len(prompts))]
        params = SamplingParams(TOKENS, temperature=1.0)
        drawn = [(params, Stops(params, None))] * len(prompts)
        try:
            with adapters_at_work(self.base.model):
                # Fewer slots than answers: some begin when others end.
                beside = self._complete(prompts, keys, drawn, [name, None, name], len(prompts) * SAMPLES - 1)
                for at, of in ((0, name), (1, None), (2, name)):
                    alone = self._complete(prompts[at : at + 1], keys[at : at + 1], drawn[:1], [of], SAMPLES)
                    if alone[0] != beside[at]:
                        return False
        except (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        return True


class _Adapters:
    """Lets passes compute each row with an adapter. PEFT's hooks stay as long as the rows do."""

    def __init__(self, base: ResidentBase) -> None:
        self._base = base
        self._names: list[str | None] | None = None
        self._open = ExitStack()

    def __enter__(self) -> _Adapters:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextmanager
    def of(self, names: list[str | None], one: bool) -> Iterator[None]:
        """`one`: the pass is over one token of each row."""
        if names != self._names:
            self._open.close()
            self._names = names
            self._open.enter_context(self._base.mixed(names) if any(names) else self._base.alone())
        with rows_alike(one):
            yield
