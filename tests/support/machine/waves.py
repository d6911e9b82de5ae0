"""The state of all waves of a launch: registers, which lanes run, and what has been written.

Vector registers are uint32 [waves, lanes], scalar registers uint32 [waves]. A value is taken for all lanes at once,
before anything is written, and is written where the wave is the one that runs and EXEC has the lane's bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.machine.assembly import EXEC, NULL, VCC, Fault, Operand, Unknown
from tests.support.machine.memory import Local, Memory

Array = np.ndarray[Any, Any]
SCALARS = 128
TYPES: dict[str, Any] = {
    "u16": np.uint16, "i16": np.int16, "f16": np.float16, "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
BITS = {16: np.uint16, 32: np.uint32, 64: np.uint64}
WHOLE, LOW, HIGH = 0xFFFF_FFFF, 0xFFFF, 0xFFFF_0000
"""Parts of a register."""


def width(kind: str) -> int:
    return int(kind[1:])


class Waves:
    def __init__(self, waves: int, lanes: int, vectors: int, groups: Array, memory: Memory, local: Local) -> None:
        self.count, self.lanes, self.group_of, self.memory, self.local = waves, lanes, groups, memory, local
        self.number = np.arange(waves)
        self.vector = np.full((vectors, waves, lanes), 0xDEAD_BEEF, np.uint32)
        self._undefined = np.full((vectors, waves, lanes), 0xFFFF_FFFF, np.uint32)
        """The bits of each register that nothing has written."""
        self._solid = [False] * vectors
        """Whether a register has no such bit in any lane."""
        self.scalar = np.full((SCALARS, waves), 0xDEAD_BEEF, np.uint32)
        self.scalar_defined = np.zeros((SCALARS, waves), bool)
        self.scc = np.zeros(waves, bool)
        self.scc_defined = np.zeros(waves, bool)
        self.epoch = np.zeros(waves, np.int64)
        """Barriers that each wave has passed."""
        self._bit = np.arange(lanes, dtype=np.uint64)
        self.running = np.ones(waves, bool)
        self.set_exec(np.ones((waves, lanes), bool))

    # --- who runs ----------------------------------------------------------------------------------

    def run(self, which: Array) -> None:
        """From now on these waves [waves] run, and the others keep what they have."""
        self.running = which
        self._exec_changed()

    def _exec_changed(self) -> None:
        self.exec = self._mask(EXEC)
        self.on = self.exec & self.running[:, None]
        self.all_on = bool(self.on.all())
        self.all_running = bool(self.running.all())

    def _mask(self, index: int) -> Array:
        bits = self.scalar[index].astype(np.uint64)
        if self.lanes == 64:
            bits |= self.scalar[index + 1].astype(np.uint64) << np.uint64(32)
        return ((bits[:, None] >> self._bit) & np.uint64(1)).astype(bool)

    def bits_of(self, mask: Array) -> Array:
        """uint64 [waves] of a mask [waves, lanes]."""
        return (mask.astype(np.uint64) << self._bit).sum(axis=1, dtype=np.uint64)

    def set_exec(self, mask: Array) -> None:
        self.put_scalar(EXEC, self.bits_of(mask), 2 if self.lanes == 64 else 1)

    # --- scalars -----------------------------------------------------------------------------------

    def _need_scalar(self, index: int) -> None:
        if not (self.scalar_defined[index] | ~self.running).all():
            raise Fault(f"reads scalar register {index}, which nothing has written")

    def scalar_bits(self, index: int, count: int) -> Array:
        """uint32 or, of two registers, uint64."""
        if index == NULL:
            return np.zeros(self.count, np.uint32 if count == 1 else np.uint64)
        for place in range(index, index + count):
            self._need_scalar(place)
        if count == 1:
            return self.scalar[index].copy()
        high = self.scalar[index + 1].astype(np.uint64) << np.uint64(32)
        return self.scalar[index].astype(np.uint64) | high

    def put_scalar(self, index: int, bits: Array, count: int = 1) -> None:
        if index == NULL:
            return
        wide = np.broadcast_to(bits, (self.count,)).astype(np.uint64)
        for place in range(count):
            word = (wide >> np.uint64(32 * place)).astype(np.uint32)
            np.copyto(self.scalar[index + place], word, where=self.running)
            self.scalar_defined[index + place] |= self.running
        if index <= EXEC + 1 and index + count > EXEC:
            self._exec_changed()

    def put_scc(self, value: Array) -> None:
        np.copyto(self.scc, value, where=self.running)
        self.scc_defined |= self.running

    def get_scc(self) -> Array:
        if not (self.scc_defined | ~self.running).all():
            raise Fault("reads SCC, which nothing has written")
        return self.scc.copy()

    def mask(self, operand: Operand) -> Array:
        """A scalar operand as a bit a lane."""
        if operand.kind == "literal":
            return np.full((self.count, self.lanes), operand.value != 0) if operand.value in (0, -1) else _no(operand)
        for place in range(operand.index, operand.index + (self.lanes // 32)):
            self._need_scalar(place)
        return self._mask(operand.index)

    def put_mask(self, operand: Operand, mask: Array) -> None:
        """A bit a lane, 0 for the lanes that do not run."""
        self.put_scalar(operand.index, self.bits_of(mask & self.exec), self.lanes // 32)

    def vcc(self) -> Array:
        return self.mask(Operand("vcc", "s", VCC))

    # --- vectors -----------------------------------------------------------------------------------

    def _need(self, index: int, parts: int, on: Array) -> None:
        if self._solid[index]:
            return
        missing = on & ((self._undefined[index] & np.uint32(parts)) != 0)
        if missing.any():
            wave, lane = (int(part[0]) for part in np.nonzero(missing))
            raise Fault(f"reads v{index} of lane {lane} of wave {wave}, which nothing has written")

    def vector_bits(self, index: int, count: int = 1, parts: int = WHOLE, on: Array | None = None) -> Array:
        """uint32 [waves, lanes] or, of two registers, uint64. `on`: the lanes whose values count."""
        if parts:
            for place in range(index, index + count):
                self._need(place, parts, self.on if on is None else on)
        if count == 1:
            return self.vector[index]
        return self.vector[index].astype(np.uint64) | (self.vector[index + 1].astype(np.uint64) << np.uint64(32))

    def put_vector(
        self, index: int, bits: Array, parts: int = WHOLE, on: Array | None = None, undefined: Array | None = None
    ) -> None:
        """uint32 to one register, uint64 to two. `parts`: LOW and HIGH write half a register. `undefined`: the bits
        that depend on what nothing has written, of the same type."""
        if bits.dtype == np.uint64:
            for place, by in enumerate((np.uint64(0), np.uint64(32))):
                word = None if undefined is None else (undefined >> by).astype(np.uint32)
                self.put_vector(index + place, (bits >> by).astype(np.uint32), parts, on, word)
            return
        missing = np.uint32(0) if undefined is None else undefined
        if parts != WHOLE:
            kept = np.uint32(~parts & WHOLE)
            by = np.uint32(16 if parts == HIGH else 0)
            bits = (self.vector[index] & kept) | (bits << by)
            missing = (self._undefined[index] & kept) | (missing << by)
        where = self.on if on is None else on
        if on is None and self.all_on:
            self.vector[index], self._undefined[index] = bits, missing
            self._solid[index] = not self._undefined[index].any() if parts != WHOLE else undefined is None
        else:
            np.copyto(self.vector[index], bits, where=where)
            np.copyto(self._undefined[index], missing, where=where)
            self._solid[index] &= undefined is None

    # --- operands ----------------------------------------------------------------------------------

    def value(self, operand: Operand, kind: str, scalar: bool = False, loose: bool = False) -> Array:
        """An operand as this type: [waves, lanes], or what broadcasts to it. `scalar`: [waves]. `loose`: bits that
        nothing has written are no fault (`undefined` has them)."""
        bits = self._raw(operand, kind, loose)
        if operand.kind == "s" and not scalar:
            bits = bits[:, None]
        size = width(kind)
        bits = bits.astype(BITS[size])
        if operand.absolute:
            bits = bits & BITS[size]((1 << (size - 1)) - 1)
        if operand.negate:
            bits = bits ^ BITS[size](1 << (size - 1))
        return np.ascontiguousarray(bits).view(TYPES[kind])

    def _raw(self, operand: Operand, kind: str, loose: bool) -> Array:
        size = width(kind)
        if operand.kind == "literal":
            return np.full((1,), literal(operand.value, kind), BITS[size])
        count = 2 if size == 64 else 1
        if operand.kind == "s":
            bits = self.scalar_bits(operand.index, count)
            return bits >> np.uint32(16) if operand.half == "h" else bits
        parts = {"l": LOW, "h": HIGH, "": LOW if size == 16 else WHOLE}[operand.half]
        bits = self.vector_bits(operand.index, count, 0 if loose else parts)
        return bits >> np.uint32(16) if operand.half == "h" else bits

    def undefined(self, operand: Operand, kind: str) -> Array | None:
        """The bits of an operand that nothing has written, as an unsigned integer of its size; None where there are
        none."""
        size = width(kind)
        count = 2 if size == 64 else 1
        if operand.kind != "v" or all(self._solid[operand.index + place] for place in range(count)):
            return None
        bits = self._undefined[operand.index] >> np.uint32(16 if operand.half == "h" else 0)
        if count == 2:
            bits = bits.astype(np.uint64) | (self._undefined[operand.index + 1].astype(np.uint64) << np.uint64(32))
        bits = np.where(self.on, bits, 0).astype(BITS[size])
        return bits if bits.any() else None

    def put(self, operand: Operand, value: Array, kind: str, undefined: Array | None = None) -> None:
        """Write a vector result of this type."""
        if operand.kind != "v":
            _no(operand)
        size = width(kind)
        bits = np.ascontiguousarray(value.astype(TYPES[kind], copy=False)).view(BITS[size])
        if size == 16 and not operand.half:  # before gfx11; what becomes of the high half is not relied on
            missing = np.uint32(0) if undefined is None else undefined.astype(np.uint32)
            high = np.broadcast_to(missing | np.uint32(HIGH), (self.count, self.lanes))
            self.put_vector(operand.index, bits.astype(np.uint32), undefined=high)
        elif size == 16:
            missing = None if undefined is None else undefined.astype(np.uint32)
            self.put_vector(
                operand.index, bits.astype(np.uint32), HIGH if operand.half == "h" else LOW, undefined=missing
            )
        else:
            self.put_vector(operand.index, bits, undefined=undefined)


def literal(value: int | float, kind: str) -> int:
    """The bits of a constant in the code: a floating-point constant in the format of the operand; an integer is itself,
    whatever the type. In 64 bits an inline integer is sign-extended; any other literal fills the low half."""
    size = width(kind)
    if isinstance(value, float):
        floating = {16: np.float16, 32: np.float32, 64: np.float64}[size]
        return int(np.array(value, floating).view(BITS[size]))
    if size == 64 and value < -16:
        return (value & 0xFFFF_FFFF) | (0xFFFF_FFFF_0000_0000 if kind == "i64" else 0)
    return value & ((1 << size) - 1)


def _no(operand: Operand) -> Any:
    raise Unknown(f"operand {operand.text!r} here")
