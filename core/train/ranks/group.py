"""What the ranks of a run do together. `Ranks()` is a run of one: nothing is sent, and everything is as it was.

Every method is collective: all ranks call it, in the same order. A rank that calls none any more is dead or in its own
code; the others then wait, until the launcher sees the death (launch.py) or the worker the silence. So no collective
has a time limit of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from core.train.checkpoint.rng import seed_all
from core.train.ranks.env import STORE, Seat

T = TypeVar("T")
NEVER = timedelta(days=14)


class PeerLost(RuntimeError):
    """A collective has failed: another rank is gone, as a rule. The one that died knows why."""


class RanksDrifted(RuntimeError):
    """The ranks' weights are not the same any more: an all-reduce that gives its ranks different bits, or a defect."""


class Ranks:
    """One rank that is alone."""

    rank = 0
    world = 1

    @property
    def first(self) -> bool:
        """Rank 0: it writes what is written once."""
        return self.rank == 0

    def any(self, mine: bool) -> bool:
        """Whether it holds for one rank at least: how all leave at the same place."""
        return mine

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank: something that JSON can say, and gives back as it was."""
        return [value]

    def share(self, value: str) -> str:
        """Rank 0's."""
        return value

    def barrier(self) -> None:
        """Nobody is beyond it before everybody has come to it."""

    def sum(self, values: Tensor) -> Tensor:
        """Element by element over all ranks, on the device; the host does not wait for a GPU."""
        return values

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See reduce.py."""

    def seed(self, seed: int) -> None:
        """Random numbers of its own for each rank from here on; rank 0 goes on as a run of one does."""

    def hold_together(self, weights: Mapping[str, Tensor]) -> None:
        """RanksDrifted when the ranks do not have the same bits."""

    def disband(self) -> None:
        """Behind it each goes its own way; the last collective."""

    @contextmanager
    def in_turn(self, wanted: bool = True) -> Iterator[None]:
        """Rank 0 first, then all others at once: they find in a cache what it has made."""
        if wanted and not self.first:
            self.barrier()
        yield
        if wanted and self.first:
            self.barrier()


ALONE = Ranks()


class Gang(Ranks):
    """Several of them, over gloo on a CPU, over NCCL (RCCL) and gloo beside a GPU."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        import torch.distributed as dist

        self.rank, self.world, self.device = seat.rank, seat.world, device
        self.backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._dist = dist
        named: dict[str, Any] = {"init_method": "env://"}
        if seat.folder is not None:
            named = {"store": dist.FileStore(str(seat.folder / STORE), seat.world)}
        with _joined():
            dist.init_process_group(
                self.backend, rank=seat.rank, world_size=seat.world, timeout=NEVER, **named,
                **({"device_id": device} if device.type == "cuda" else {}),
            )  # fmt: skip

    def any(self, mine: bool) -> bool:
        wish = torch.tensor([mine], dtype=torch.int32)
        with _joined():
            self._dist.all_reduce(wish, op=self._dist.ReduceOp.MAX)
        return bool(wish.item())

    def gather(self, value: T) -> list[T]:
        # torch's all_gather_object would unpickle what comes over a socket.
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(text)
        with _joined():
            self._dist.all_reduce(sizes)
            mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            mine[: len(text)] = torch.from_numpy(text.copy())
            found = [torch.empty_like(mine) for _ in range(self.world)]
            self._dist.all_gather(found, mine)
        texts = [one[:size].numpy().tobytes() for one, size in zip(found, sizes.tolist(), strict=True)]
        return [json.loads(one) for one in texts]

    def share(self, value: str) -> str:
        return self.gather(value if self.first else "")[0]

    def barrier(self) -> None:
        self.any(False)  # dist.barrier would be NCCL's, which lets the host go on

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        with _joined():
            self._dist.all_reduce(total)
        return total

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        from core.train.ranks.reduce import sum_gradients

        with _joined():
            sum_gradients(parameters)

    def seed(self, seed: int) -> None:
        if not self.first:
            seed_all(int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0]))
            random.seed(f"{seed} {self.rank}")

    def hold_together(self, weights: Mapping[str, Tensor]) -> None:
        found = self.gather(fingerprint(weights))
        if len(set(found)) > 1:
            raise RanksDrifted(f"the ranks' weights are not the same any more (checksums {found})")

    def disband(self) -> None:
        self.barrier()
        with _joined():
            self._dist.destroy_process_group()


def join(seat: Seat | None, device: torch.device) -> Ranks:
    """The ranks of this run, all of them there. PeerLost when one does not come."""
    return Ranks() if seat is None else Gang(seat, device)


def fingerprint(weights: Mapping[str, Tensor]) -> int:
    """A checksum of their bits."""
    sums = []
    for tensor in weights.values():
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}.get(flat.element_size(), torch.uint8))
        sums.append(bits.sum(dtype=torch.int64))
    total = 0
    for one in torch.stack(sums).tolist() if sums else []:
        total = (total * 1_000_003 + one) % (1 << 61)
    return total


@contextmanager
def _joined() -> Iterator[None]:
    """What gloo and NCCL raise when a peer is gone, as PeerLost."""
    from core.train.base.out_of_memory import is_out_of_memory

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerLost) or is_out_of_memory(error):
            raise
        raise PeerLost(str(error)) from error
