"""What a memory plan says: bytes by kind, and whether they fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from core.plan.stream import MARGIN, Decision


@dataclass(frozen=True, slots=True)
class Item:
    kind: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    device: tuple[Item, ...]
    """On the device at the moment at which it holds most. Kinds: weights, reward models, adapter, gradients, optimizer,
    activations, logits, slots, scratch, rounding, slack."""
    moment: str
    """The moment: `reference`, `loss`, `backward begins`, `backward ends`, `step`, `evaluation`, `rollout` or
    `rewards`."""
    moments: dict[str, int]
    """Bytes at each of the moments."""
    host: tuple[Item, ...]
    """In host memory. On a CPU this comes on top of `device`."""
    disk: tuple[Item, ...]
    rows: int
    """Rows of the largest forward pass; with a budget of tokens, as many of the longest as fit."""
    tokens: int
    """Tokens of the largest forward pass, padding counted."""
    field: str
    """The field that decides `tokens`."""
    parameters: int
    trained: int
    """Trained parameters: some of `parameters`, or adapters beside them."""
    precision: str
    stream: Decision
    one_memory: bool

    @property
    def peak(self) -> int:
        """Bytes that must fit into the device's memory; on a CPU with what is kept aside, which is the same memory."""
        return sum(item.bytes for item in self.device) + (self.host_bytes if self.one_memory else 0)

    @property
    def host_bytes(self) -> int:
        return sum(item.bytes for item in self.host)

    @property
    def disk_bytes(self) -> int:
        return sum(item.bytes for item in self.disk)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return {item.kind: item.bytes for item in self.device}

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {
            "peak": self.peak,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }


def fits(plan: Plan, free: int | None) -> bool:
    """Whether the plan fits into the free memory with MARGIN to spare; True where that is unknown."""
    return free is None or plan.peak <= MARGIN * free
