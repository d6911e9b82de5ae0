"""Which rows every step holds, and how they are cut into batches: pure functions of (seed, step, rank, world).

Nothing is drawn on the way, so a cursor is two numbers and resuming needs no replay. Three rules hold for every order:

- each epoch holds every row exactly once, in a fresh arrangement;
- the rows of a step depend on the size of the step alone (batch × accumulation × world): a run may be gone on with
  smaller batches and more of them;
- a step's batches are dealt out to the ranks in turn: each batch is one rank's, and all ranks have as many, since they
  wait for each other in every one. Where the rows are too few for that a batch is empty.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any, assert_never

import torch

from core.plan.steps import step_size, steps_for, total_steps
from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.job import JobSpec
from core.train.data.packing import best_fit, spread

POOL_STEPS = 100
"""Rows are drawn together for this many steps and sorted or packed among themselves (transformers' group_by_length has
50 of them): enough for little padding, few enough that rows still meet by chance."""


class StepOrder(ABC):
    """See the module. `lengths`: tokens of every row, as far as the order depends on them."""

    def __init__(
        self,
        rows: int,
        lengths: Sequence[int],
        *,
        batch_size: int,
        accumulation: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        self.rows, self.lengths = rows, lengths
        self.batch_size, self.accumulation, self.seed = batch_size, accumulation, seed
        self.rank, self.world = rank, world
        self.step_size = batch_size * accumulation * world
        self._saved_batch_size = batch_size
        self._first_steps = [0]  # of every epoch that was looked at, and of the one behind
        self._epoch = -1
        self._steps: Sequence[Sequence[int]] = ()

    # --- what an order decides -----------------------------------------------------------------------

    unit: str
    """What `batch_size` counts."""

    @abstractmethod
    def plan(self, epoch: int) -> Sequence[Sequence[int]]:
        """The rows of every step of an epoch."""

    @abstractmethod
    def cut(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        """The rows of a step as batches of at most `batch_size`."""

    # --- the order -----------------------------------------------------------------------------------

    def steps_of(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        while len(self._first_steps) <= epoch + 1:
            at = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + len(self._planned(at)))
        return self._first_steps[epoch + 1] - self._first_steps[epoch]

    def total_steps(self, epochs: float, max_steps: int | None) -> int:
        return total_steps(epochs, max_steps, self.steps_of)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, place in it) of a 0-based step."""
        epoch = 0
        while step >= self._first_steps[epoch] + self.steps_of(epoch):
            epoch += 1
        return epoch, step - self._first_steps[epoch]

    def epochs_after(self, steps: int) -> float:
        """Passes over the rows that so many steps are."""
        epoch, place = self.locate(steps)
        return epoch + place / self.steps_of(epoch)

    def rows_of(self, step: int) -> Sequence[int]:
        """Rows of a 0-based step, of all ranks together."""
        epoch, place = self.locate(step)
        return self._planned(epoch)[place]

    def window(self, step: int) -> list[list[int]]:
        """Row numbers of every batch of this rank in a 0-based step; with several ranks the last may be empty."""
        return self._dealt(step, self.batch_size)

    def _dealt(self, step: int, batch_size: int) -> list[list[int]]:
        return self._cut(step, batch_size)[self.rank :: self.world]

    def _cut(self, step: int, batch_size: int) -> list[list[int]]:
        """The batches of a step on all ranks, those of one micro-step side by side."""
        return dealt_evenly(self.cut(self.rows_of(step), batch_size), self.world)

    def _planned(self, epoch: int) -> Sequence[Sequence[int]]:
        if epoch != self._epoch:
            self._steps = self.plan(epoch)
            self._epoch = epoch
        return self._steps

    # --- where a run is ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place itself is the engine's (steps, micro_steps); this is what gives it a meaning."""
        return {
            "order": type(self).__name__,
            "rows": self.rows,
            "lengths": self._lengths_digest,
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "seed": self.seed,
            "world": self.world,
        }

    @cached_property
    def _lengths_digest(self) -> str:
        return digest(self.lengths)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError when the checkpoint was made over other rows, or steps of another size."""
        here = self.state_dict()
        then: dict[str, Any] = {
            "order": "BatchOrder",
            "lengths": digest(()),
            "world": 1,
        } | state  # as version 0.1 wrote it
        for name, words in (
            ("order", "batching"),
            ("rows", "rows"),
            ("seed", "seed"),
            ("lengths", "lengths of rows"),
            ("world", "number of ranks"),
        ):
            if then[name] != here[name]:
                raise ValueError(f"its data had {words} = {then[name]}, this run has {here[name]}")
        size = then["batch_size"] * then["accumulation"] * then["world"]
        if size != self.step_size:
            raise ValueError(f"its steps had {size} {self.unit}, those of this run have {self.step_size}")
        self._saved_batch_size = then["batch_size"]

    def translate(self, step: int, micro_steps: int) -> int | None:
        """How many micro-steps of ours hold just the rows of the first `micro_steps` of a 0-based step as the loaded
        checkpoint cut it; None when one of ours would begin inside one of those. Rows of all ranks: which of them did
        a row makes no difference to the step's sum, so all get the same answer."""
        before = {row for rows in self._cut(step, self._saved_batch_size)[: micro_steps * self.world] for row in rows}
        ours = self._cut(step, self.batch_size)
        done: set[int] = set()
        batches = 0
        while done != before and batches * self.world < len(ours):
            done.update(row for rows in ours[batches * self.world :][: self.world] for row in rows)
            batches += 1
        return batches if done == before else None

    # --- chance --------------------------------------------------------------------------------------

    def shuffled(self, count: int, *about: int | str) -> array[int]:
        """The numbers below `count`, in an order that depends on the seed and on what it is `about`. Eight bytes each,
        where a list takes 36: a corpus has millions of rows."""
        text = " ".join(str(word) for word in ("order", self.seed, *about))
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        )
        order = array("q")
        order.frombytes(torch.randperm(count, generator=generator).numpy().data.cast("B"))
        return order


def dealt_evenly(batches: list[list[int]], world: int) -> list[list[int]]:
    """As many batches for each of `world` ranks, those of one micro-step side by side; batches are halved for that."""
    while len(batches) % world:
        fullest = max(range(len(batches)), key=lambda at: len(batches[at]))
        rows = batches[fullest]
        batches[fullest] = rows[: (len(rows) + 1) // 2]
        batches.append(rows[(len(rows) + 1) // 2 :])  # empty where no batch has two rows
    return batches


def digest(lengths: Sequence[int]) -> str:
    """Short hash of the rows' lengths."""
    found, numbers, comma = hashlib.sha256(), iter(lengths), ""
    while some := list(itertools.islice(numbers, 1 << 16)):
        found.update(f"{comma}{','.join(map(str, some))}".encode())
        comma = ","
    return found.hexdigest()[:16]


# --- a fixed number of rows ------------------------------------------------------------------------------


class BatchOrder(StepOrder):
    """`batch_size` rows a batch, in random order. The last batch of an epoch may be smaller, and its last accumulation
    window shorter, as with transformers' Trainer; no row is dropped."""

    unit = "rows"

    def __init__(
        self, rows: int, *, batch_size: int, accumulation: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(rows, (), batch_size=batch_size, accumulation=accumulation, seed=seed, rank=rank, world=world)
        self.steps_per_epoch = steps_for(rows, self.step_size)

    def plan(self, epoch: int) -> Sequence[Sequence[int]]:
        order = self.epoch_order(epoch)
        return [order[at : at + self.step_size] for at in range(0, self.rows, self.step_size)]

    def cut(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        return [list(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)]

    def steps_of(self, epoch: int) -> int:
        return self.steps_per_epoch

    def locate(self, step: int) -> tuple[int, int]:
        return divmod(step, self.steps_per_epoch)

    def epoch_order(self, epoch: int) -> Sequence[int]:
        """All rows of an epoch, one step after another."""
        return self.shuffled(self.rows, epoch)


class GroupedOrder(BatchOrder):
    """As BatchOrder, and the rows of a step are of like length. The step with the longest row is the very first: a
    run that does not fit into memory says so at once."""

    def __init__(self, lengths: Sequence[int], **sizes: int) -> None:
        super().__init__(len(lengths), **sizes)
        self.lengths = lengths

    def epoch_order(self, epoch: int) -> Sequence[int]:
        order = self.shuffled(self.rows, epoch)
        pool = POOL_STEPS * self.step_size
        pools = [order[at : at + pool] for at in range(0, self.rows, pool)]
        ordered = [row for rows in pools for row in sorted(rows, key=self.lengths.__getitem__, reverse=True)]
        steps = [ordered[at : at + self.step_size] for at in range(0, self.rows, self.step_size)]
        last = [steps.pop()] if len(steps[-1]) < self.step_size else []  # steps are cut by their number: it stays last
        steps = [steps[at] for at in self.shuffled(len(steps), epoch, "steps")] + last
        if epoch == 0 and len(steps) > 1:
            widest = max(range(len(steps) - len(last)), key=lambda at: self.lengths[steps[at][0]])
            steps[0], steps[widest] = steps[widest], steps[0]
        return [row for rows in steps for row in rows]


# --- a budget of tokens ----------------------------------------------------------------------------------


class _Budget(StepOrder):
    """Steps of at most batch × accumulation × world tokens, made from pools of shuffled rows. What a pool leaves over
    goes to the next, so that an epoch has one smaller step at most."""

    unit = "tokens"

    def __init__(self, lengths: Sequence[int], **sizes: int) -> None:
        super().__init__(len(lengths), lengths, **sizes)

    @abstractmethod
    def fill(self, rows: list[int]) -> list[list[int]]:
        """The rows of a pool as steps; the least filled comes last."""

    def plan(self, epoch: int) -> Sequence[Sequence[int]]:
        steps: list[array[int]] = []
        pool: list[int] = []
        tokens = 0
        for row in self.shuffled(self.rows, epoch):
            pool.append(row)
            tokens += self.lengths[row]
            if tokens >= POOL_STEPS * self.step_size:
                *full, pool = self.fill(pool)
                steps += [array("q", rows) for rows in full]
                tokens = sum(self.lengths[left] for left in pool)
        steps += [array("q", rows) for rows in self.fill(pool)]
        return [steps[at] for at in self.shuffled(len(steps), epoch, "steps")]


class TokenOrder(_Budget):
    """Rows of like length, padded: rows × the longest of them is at most `batch_size` tokens."""

    def fill(self, rows: list[int]) -> list[list[int]]:
        return self._runs(sorted(rows, key=self.lengths.__getitem__, reverse=True), self.step_size)

    def cut(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        return self._runs(rows, batch_size)

    def _runs(self, rows: Sequence[int], tokens: int) -> list[list[int]]:
        """Cut rows, longest first, wherever one more would exceed the budget."""
        runs: list[list[int]] = []
        for row in rows:
            if not runs or (len(runs[-1]) + 1) * self.lengths[runs[-1][0]] > tokens:
                runs.append([])
            runs[-1].append(row)
        return runs


class PackedOrder(_Budget):
    """Rows end to end: the sum of their lengths is at most `batch_size` tokens."""

    def fill(self, rows: list[int]) -> list[list[int]]:
        bins = best_fit(rows, self.lengths, self.step_size)
        return sorted(bins, key=lambda held: -sum(self.lengths[row] for row in held))

    def cut(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        return spread(rows, self.lengths, batch_size, multiple=self.world)


# --- from the spec ---------------------------------------------------------------------------------------


def build_order(spec: JobSpec, lengths: Sequence[int], *, rank: int = 0, world: int = 1) -> StepOrder:
    """The order that a job asks for over rows of these lengths. Rows of a stage that answers prompts are prompts, and a
    step has those of one rollout."""
    training = spec.training
    accumulation, seed = training.gradient_accumulation_steps, training.seed
    size = training.per_device_train_batch_size
    if isinstance(spec.stage, RolloutStage):  # of all ranks together, whoever answers them
        size, accumulation = step_size(spec), 1
    match spec.batching:
        case Rows(group_by_length=False):
            return BatchOrder(
                len(lengths), batch_size=size, accumulation=accumulation, seed=seed, rank=rank, world=world
            )
        case Rows():
            return GroupedOrder(lengths, batch_size=size, accumulation=accumulation, seed=seed, rank=rank, world=world)
        case Tokens(tokens_per_batch=tokens):
            return TokenOrder(lengths, batch_size=tokens, accumulation=accumulation, seed=seed, rank=rank, world=world)
        case Packed(tokens_per_batch=tokens):
            return PackedOrder(lengths, batch_size=tokens, accumulation=accumulation, seed=seed, rank=rank, world=world)
        case _ as never:
            assert_never(never)
