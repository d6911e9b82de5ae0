"""What the ranks of a session do together. Every method is collective: all ranks call it, in the same order. With one
rank all of them are what they are called around, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from core.errors import EftError
from core.spec.run.frames import Frame, pack, unpack
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.stop import StopRequested
from core.train.engine import Engine
from core.train.generation.sampling import Completion
from core.train.ranks.group import ProcessGroup, RanksDiverged
from core.train.session.faults import BadOperation
from core.train.session.sampling import Draw

T = TypeVar("T")
Drawn = list[list[list[Completion]]]
"""By operation, prompt and key."""


def shares(weights: Sequence[int], ranks: int) -> list[range]:
    """Consecutive places for each rank, with about as much weight for each: none has more than its part and half of the
    largest weight at either end. Weights are above 0."""
    total, before, counts = sum(weights), 0, [0] * ranks
    for weight in weights:
        counts[((2 * before + weight) * ranks - 1) // (2 * total)] += 1
        before += weight
    ends = [sum(counts[: rank + 1]) for rank in range(ranks)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def part_of(draws: Sequence[Draw], places: range) -> list[Draw]:
    """The operations with those of their answers alone that stand at these places among the answers to all of them."""
    found, at = [], 0
    for draw in draws:
        prompts, keys = [], []
        for prompt, wanted in zip(draw.prompts, draw.keys, strict=True):
            mine = [key for place, key in enumerate(wanted, at) if place in places]
            at += len(wanted)
            if mine:
                prompts.append(prompt)
                keys.append(mine)
        if prompts:
            found.append(replace(draw, prompts=prompts, keys=keys))
    return found


class Crew:
    """The ranks of a session, as one of them sees them."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self.rank, self.first, self._several = ranks.rank, ranks.first, ranks.world > 1

    # --- what rank 0 lets the others hear

    def tell(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Let all others hear a frame; for rank 0."""
        if self._several:
            self._ranks.broadcast_bytes(pack(Frame(dict(header), body)))

    def hear(self) -> Frame:
        """Wait for the next frame; for all others."""
        return unpack(self._ranks.broadcast_bytes(b""))

    # --- agreement

    def agreed(self, compute: Callable[[], T], word: Callable[[T], Any] = lambda value: None) -> tuple[T, list[Any]]:
        """Compute something that changes nothing by itself: its value on this rank, and a word on it from each. Where
        one rank could not, all raise: StopRequested, MemoryError or BadOperation."""
        if not self._several:
            value = compute()
            return value, [word(value)]
        told: dict[str, Any]
        try:
            found = compute()
            told = {"word": word(found)}
        except StopRequested:
            told = {"stop": True}
        except EftError as error:
            told = {"fault": error.as_dict()}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            told = {"memory": str(error)}
        words = self._ranks.all_gather(told)
        if any("stop" in one for one in words):
            raise StopRequested
        for one in words:
            if "memory" in one:
                raise MemoryError(one["memory"])
        for one in words:
            if "fault" in one:
                raise BadOperation(one["fault"]["message"], field=one["fault"]["field"], code=one["fault"]["code"])
        return found, [one["word"] for one in words]

    def alike(self, change: Callable[[], T]) -> T:
        """Change the state of all ranks. RanksDiverged where one could what another could not: the attempt ends, and
        the next one begins from a snapshot."""
        if not self._several:
            return change()
        fault: Exception | None = None
        try:
            found = change()
        except Exception as error:
            if not isinstance(error, EftError) and not is_out_of_memory(error):
                raise
            fault = error
        words = self._ranks.all_gather(None if fault is None else f"{type(fault).__name__}: {fault}")
        if any((word is None) != (words[0] is None) for word in words):
            raise RanksDiverged(f"one rank could what another could not ({words})")
        if fault is not None:
            raise fault
        return found

    def check_in_sync(self, weights: Mapping[str, Tensor]) -> None:
        """Raises RanksDiverged where the ranks do not have the same bits."""
        self._ranks.assert_in_sync(weights)

    def one_position(self, position: int) -> int:
        """Raises RanksDiverged where the ranks have not read the same snapshot."""
        found = self._ranks.all_gather(position)
        if len(set(found)) > 1:
            raise RanksDiverged(f"the ranks have read snapshots of different positions: {found}")
        return position

    # --- shares

    def share(self, weights: Sequence[int], together: int = 1) -> range:
        """Places of what this rank computes; groups of `together` are never apart."""
        if not self._several:
            return range(len(weights))
        groups = [sum(weights[at : at + together]) for at in range(0, len(weights), together)]
        mine = shares(groups, self._ranks.world)[self.rank]
        return range(mine.start * together, min(mine.stop * together, len(weights)))

    def gathered(self, compute: Callable[[], tuple[float, list[Tensor]]]) -> tuple[float, list[Tensor]]:
        """Compute this rank's share: a loss, and tensors of which the first dimension is that of its examples' targets.
        All ranks get the sum of the losses, and the tensors of all ranks one behind the other, on the CPU. Raises as
        `agreed`."""
        if not self._several:
            return compute()
        (_, mine), losses = self.agreed(compute, lambda found: found[0])
        body = bytes_of({str(at): each.detach().to("cpu").contiguous() for at, each in enumerate(mine)})
        parts = [part for one in self._ranks.all_gather_bytes(body) if (part := tensors_of(one))]
        loss = 0.0
        for one in losses:
            loss += one
        return loss, [torch.cat([part[str(at)] for part in parts]) for at in range(len(parts[0]) if parts else 0)]

    def drawn(self, draws: Sequence[Draw], complete: Callable[[Sequence[Draw]], Drawn]) -> Drawn:
        """The answers to each operation, each drawn by one rank. Raises as `agreed`."""
        if not self._several:
            return complete(draws)
        mine = part_of(draws, self.share([1] * sum(draw.answers for draw in draws)))

        def compute() -> list[Completion]:
            found = complete(mine) if mine else []
            return [one for draw in found for prompt in draw for one in prompt]

        _, told = self.agreed(compute, lambda found: [asdict(one) for one in found])
        flat = iter([Completion(**one) for words in told for one in words])
        return [[[next(flat) for _ in keys] for keys in draw.keys] for draw in draws]

    @contextmanager
    def window(self, engine: Engine) -> Iterator[None]:
        """Around passes over a share each: gradients are summed over the ranks, and added to those that were there. An
        exception leaves the window undone, to be restored by the caller."""
        if not self._several:
            yield
            return
        trained, micro_steps = engine.trained_parameters, engine.micro_steps
        before = {name: parameter.grad for name, parameter in trained.items()}
        for parameter in trained.values():
            parameter.grad = None
        yield
        self._ranks.sum_gradients(trained)
        engine.micro_steps = micro_steps + sum(self._ranks.all_gather(engine.micro_steps - micro_steps))
        for name, parameter in trained.items():
            if (old := before[name]) is not None:
                parameter.grad = old if parameter.grad is None else parameter.grad.add_(old)
