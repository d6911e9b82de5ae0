"""Whether a run streams its blocks, and from where: `memory.stream` settled against what the box has. No torch.

The rule for `auto`: everything on the device if it fits there with MARGIN to spare; else the blocks in host memory, if
they leave a part of it to the rest of the box; else in files. Two slots, or one where two do not fit. On a CPU, device
and host are one memory: what does not fit there is streamed from disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, assert_never

from core.spec.axes.runtime import AutoStream, DiskStream, HostStream, NoStream, Stream

MARGIN = 0.9
"""Share of the free device memory that a plan may use: the allocator's own slack, and what an estimate misses."""
HOST_SHARE = 0.8
"""Share of the free host memory that blocks may take."""

Where = Literal["none", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a job, estimated before anything is loaded."""

    blocks: int
    """Streamed weights of all blocks."""
    largest_block: int
    outside: int
    """Weights that stay on the device in any case."""
    trained: int
    """Trained parameters, with gradients and optimizer state."""
    working: int
    """Activations and logits of the largest batch, with nothing streamed."""
    working_streamed: int
    """Activations and logits where each block keeps its input alone."""
    of: int
    """Number of blocks."""


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that are free now; None where that is unknown."""

    device: int | None
    host: int | None
    one_memory: bool
    """The device is the CPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the blocks are held; part of the run record."""

    where: Where
    slots: int
    pinned: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decide(asked: Stream, need: Need | None, free: Free) -> Decision:
    """Where this setting, `auto` included, has the blocks held. `need` None: the job trains what would be streamed, or
    its weights could not be measured."""
    match asked:
        case NoStream():
            return Decision("none", 0, False, "as asked for")
        case HostStream() | DiskStream():
            return Decision(asked.type, asked.slots, asked.pinned, "as asked for")
        case AutoStream():
            return _auto(asked, need, free)
        case _ as never:
            assert_never(never)


def _auto(asked: AutoStream, need: Need | None, free: Free) -> Decision:
    if need is None:
        return Decision("none", 0, False, "nothing of this job can be streamed")
    whole = need.blocks + need.outside + need.trained + need.working
    if free.device is None or whole <= MARGIN * free.device:
        room = "unknown" if free.device is None else _gib(free.device)
        return Decision("none", 0, False, f"all of it fits on the device: about {_gib(whole)} of {room} free")
    beside = need.outside + need.trained + need.working_streamed
    slots = min(asked.slots, need.of)
    if slots > 1 and beside + slots * need.largest_block > MARGIN * free.device:
        slots = 1
    why = f"about {_gib(whole)} do not fit in the {_gib(free.device)} that are free on the device"
    if free.one_memory:
        return Decision("disk", slots, asked.pinned, f"{why}, which is the host's memory")
    if free.host is None or need.blocks <= HOST_SHARE * free.host:
        return Decision("host", slots, asked.pinned, f"{why}; the blocks' {_gib(need.blocks)} fit in host memory")
    return Decision("disk", slots, asked.pinned, f"{why}, nor the blocks' {_gib(need.blocks)} in host memory")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
