"""Memory that knows its bounds, and which of its bytes have been written.

Every buffer lies in a terabyte of its own, near the end of a 4 GiB page: an address that is off is in no buffer, and a
carry that is lost between the halves of an address shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.machine.assembly import Fault

Array = np.ndarray[Any, Any]
STRIDE = 1 << 40
START = 0xFFFF_F000


@dataclass(slots=True)
class Buffer:
    name: str
    data: Array
    """uint8, from the first byte that the program may touch."""
    written: Array | None
    """bool of each byte; None where all are."""
    base: int


class Memory:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, name: str, data: Array, written: bool = True, alignment: int = 0) -> int:
        """The address of these bytes (uint8), `alignment` bytes past a page."""
        base = (len(self.buffers) + 1) * STRIDE + START + alignment
        self.buffers.append(Buffer(name, data, None if written else np.zeros(data.size, bool), base))
        return base

    def load(self, address: Array, on: Array, size: int) -> Array:
        """uint8 [..., size] at each address (uint64) of the lanes that are `on`, zeros for the others."""
        found = np.zeros((*address.shape, size), np.uint8)
        for buffer, lanes, at in self._places(address, on, size, "reads"):
            if buffer.written is not None and not buffer.written[at].all():
                first = int(at[~buffer.written[at]].min())
                raise Fault(f"reads byte {first} of {buffer.name}, which nothing has written")
            found[lanes] = buffer.data[at]
        return found

    def store(self, address: Array, on: Array, values: Array) -> None:
        for buffer, lanes, at in self._places(address, on, values.shape[-1], "writes"):
            buffer.data[at] = values[lanes]
            if buffer.written is not None:
                buffer.written[at] = True

    def _places(self, address: Array, on: Array, size: int, verb: str) -> Any:
        if not on.any():
            return
        which = ((address - np.uint64(START)) >> np.uint64(40)).astype(np.int64) - 1
        for number in np.unique(which[on]):
            lanes = on & (which == number)
            if not 0 <= number < len(self.buffers):
                raise Fault(f"{verb} {size} bytes at {int(address[lanes][0]):#x}, which is in no buffer")
            buffer = self.buffers[number]
            offset = (address[lanes] - np.uint64(buffer.base)).astype(np.int64)
            outside = (offset < 0) | (offset + size > buffer.data.size)
            if outside.any():
                at = int(offset[outside][0])
                raise Fault(
                    f"{verb} {size} bytes at byte {at} of {buffer.name}, which has {buffer.data.size}: out of bounds"
                )
            yield buffer, lanes, offset[:, None] + np.arange(size)


class Local:
    """The local memory of every workgroup. A byte that another wave has written since the last barrier that both have
    passed is a race, whichever order the machine happens to take."""

    def __init__(self, groups: int, size: int, waves: int) -> None:
        self.size = size
        self.data = np.zeros((groups, size), np.uint8)
        self.writer = np.full((groups, size), -1, np.int64)
        self.written_at = np.full((groups, size), -1, np.int64)
        self.read_by = np.full((groups, size), -1, np.int64)
        """The wave that read it last; more than one: `waves`."""
        self.read_at = np.full((groups, size), -1, np.int64)
        self._many = waves

    def _places(self, group: Array, address: Array, on: Array, size: int, verb: str) -> tuple[Array, Array]:
        offset = address[on].astype(np.int64)
        if (offset + size > self.size).any():
            raise Fault(
                f"{verb} {size} bytes at {int(offset.max())} of {self.size} bytes of local memory: out of bounds"
            )
        groups = np.broadcast_to(group[:, None], address.shape)[on]
        return groups[:, None], offset[:, None] + np.arange(size)

    def load(self, wave: Array, group: Array, epoch: Array, address: Array, on: Array, size: int) -> Array:
        """`wave`, `group` and `epoch` [N]: number, workgroup and barriers passed of each wave; address [N, lanes]."""
        found = np.zeros((*address.shape, size), np.uint8)
        if not on.any():
            return found
        at = self._places(group, address, on, size, "reads")
        if (self.writer[at] < 0).any():
            raise Fault("reads a byte of local memory that nothing has written")
        waves, epochs = (np.broadcast_to(part[:, None], address.shape)[on][:, None] for part in (wave, epoch))
        if ((self.writer[at] != waves) & (self.written_at[at] == epochs)).any():
            raise Fault("reads local memory that another wave has written since the last barrier")
        others = (self.read_at[at] == epochs) & (self.read_by[at] != waves) & (self.read_by[at] >= 0)
        self.read_by[at] = np.where(others, self._many, waves)
        self.read_at[at] = epochs
        found[on] = self.data[at]
        return found

    def store(self, wave: Array, group: Array, epoch: Array, address: Array, on: Array, values: Array) -> None:
        if not on.any():
            return
        at = self._places(group, address, on, values.shape[-1], "writes")
        waves, epochs = (np.broadcast_to(part[:, None], address.shape)[on][:, None] for part in (wave, epoch))
        if ((self.read_by[at] != waves) & (self.read_at[at] == epochs)).any():
            raise Fault("writes local memory that another wave has read since the last barrier")
        other = (self.writer[at] >= 0) & (self.writer[at] != waves) & (self.written_at[at] == epochs)
        if (other & (self.data[at] != values[on])).any():
            raise Fault("writes other bytes to local memory than another wave since the last barrier")
        self.data[at] = values[on]
        self.writer[at], self.written_at[at] = waves, epochs
