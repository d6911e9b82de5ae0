"""What the ranks of a run do together. A `ProcessGroup` by itself is a run of one rank: nothing is sent.

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

from core.train.base.rng import seed_all
from core.train.ranks.env import STORE, RankEnv

T = TypeVar("T")
NEVER = timedelta(days=14)


class PeerLost(RuntimeError):
    """A collective has failed: another rank is gone, as a rule. The one that died knows why."""


class RanksDiverged(RuntimeError):
    """The ranks' weights are not the same any more: an all-reduce that gives its ranks different bits, or a defect."""


class ProcessGroup:
    """The ranks of a run, as one of them sees them; by itself the group of one rank."""

    rank = 0
    world = 1

    @property
    def first(self) -> bool:
        """Rank 0: it writes what is written once."""
        return self.rank == 0

    def any_rank(self, mine: bool) -> bool:
        """Whether it holds for at least one rank. All ranks leave a run at the same place by it."""
        return mine

    def all_gather(self, value: T) -> list[T]:
        """Collect every rank's value, by rank: anything that survives JSON unchanged."""
        return [value]

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Collect every rank's bytes, by rank."""
        return [value]

    def broadcast_bytes(self, value: bytes) -> bytes:
        """Answer rank 0's bytes on every rank."""
        return value

    def broadcast(self, value: str) -> str:
        """Answer rank 0's value on every rank."""
        return value

    def barrier(self) -> None:
        """Block until every rank has reached it."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum element by element over all ranks, on the device; the host does not wait for a GPU."""
        return values

    def all_maximum(self, values: Tensor) -> Tensor:
        """Take the largest element by element over all ranks, on the device."""
        return values

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See reduce.py."""

    def seed(self, seed: int) -> None:
        """Give each rank random numbers of its own from here on; rank 0 goes on as a run of one does."""

    def assert_in_sync(self, weights: Mapping[str, Tensor]) -> None:
        """Raise RanksDiverged when the ranks do not have the same bits."""

    def destroy(self) -> None:
        """Destroy the process group; no collective may follow."""

    @contextmanager
    def rank_zero_first(self, wanted: bool = True) -> Iterator[None]:
        """Run the block on rank 0 first, then on all others at once: they find in a cache what it has made."""
        if wanted and not self.first:
            self.barrier()
        yield
        if wanted and self.first:
            self.barrier()


SINGLE_PROCESS = ProcessGroup()


class TorchProcessGroup(ProcessGroup):
    """Several ranks, over gloo on a CPU, over NCCL (RCCL) and gloo beside a GPU."""

    def __init__(self, rank_env: RankEnv, device: torch.device) -> None:
        import torch.distributed as dist

        self.rank, self.world, self.device = rank_env.rank, rank_env.world, device
        self.backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._dist = dist
        folder = rank_env.folder
        store: Any = dist  # FileStore is not among the names that torch declares as exported
        with _joined():
            dist.init_process_group(
                self.backend,
                init_method="env://" if folder is None else None,
                store=None if folder is None else store.FileStore(str(folder / STORE), rank_env.world),
                rank=rank_env.rank,
                world_size=rank_env.world,
                timeout=NEVER,
                device_id=device if device.type == "cuda" else None,
            )

    def any_rank(self, mine: bool) -> bool:
        wish = torch.tensor([mine], dtype=torch.int32)
        with _joined():
            self._dist.all_reduce(wish, op=self._dist.ReduceOp.MAX)
        return bool(wish.item())

    def all_gather(self, value: T) -> list[T]:
        # torch's all_gather_object would unpickle what comes over a socket.
        return [json.loads(one) for one in self.all_gather_bytes(json.dumps(value).encode())]

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(value)
        with _joined():
            self._dist.all_reduce(sizes)
            mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            mine[: len(value)] = torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
            found = [torch.empty_like(mine) for _ in range(self.world)]
            self._dist.all_gather(found, mine)
        return [one[:size].numpy().tobytes() for one, size in zip(found, sizes.tolist(), strict=True)]

    def broadcast_bytes(self, value: bytes) -> bytes:
        size = torch.tensor([len(value)], dtype=torch.int64)
        with _joined():
            self._dist.broadcast(size, src=0)
            found = torch.empty(int(size), dtype=torch.uint8)
            if self.first:
                found.copy_(torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy()))
            self._dist.broadcast(found, src=0)
        return found.numpy().tobytes()

    def broadcast(self, value: str) -> str:
        return self.broadcast_bytes(value.encode()).decode()

    def barrier(self) -> None:
        self.any_rank(False)  # dist.barrier would be NCCL's, which lets the host go on

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.clone()
        with _joined():
            self._dist.all_reduce(total)
        return total

    def all_maximum(self, values: Tensor) -> Tensor:
        most = values.clone()
        with _joined():
            self._dist.all_reduce(most, op=self._dist.ReduceOp.MAX)
        return most

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        from core.train.ranks.reduce import sum_gradients

        with _joined():
            sum_gradients(parameters)

    def seed(self, seed: int) -> None:
        if not self.first:
            seed_all(int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0]))
            random.seed(f"{seed} {self.rank}")

    def assert_in_sync(self, weights: Mapping[str, Tensor]) -> None:
        found = self.all_gather(fingerprint(weights))
        if len(set(found)) > 1:
            raise RanksDiverged(f"the ranks' weights are not the same any more (checksums {found})")

    def destroy(self) -> None:
        self.barrier()
        with _joined():
            self._dist.destroy_process_group()


def join(rank_env: RankEnv | None, device: torch.device) -> ProcessGroup:
    """Join the other ranks of this run, and wait until all have. PeerLost when one does not come."""
    return ProcessGroup() if rank_env is None else TorchProcessGroup(rank_env, device)


def fingerprint(weights: Mapping[str, Tensor]) -> int:
    """Compute a checksum of the bits of all weights."""
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
    """Raise PeerLost for what gloo and NCCL raise when a peer is gone."""
    from core.train.base.out_of_memory import is_out_of_memory

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerLost) or is_out_of_memory(error):
            raise
        raise PeerLost(str(error)) from error
