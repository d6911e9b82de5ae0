"""Exact references for the emulator's instructions, in integers and fractions, and a way to run one of them."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np

from tests.support.machine import assembly
from tests.support.machine.assembly import Program
from tests.support.machine.launch import _Run
from tests.support.machine.memory import Local, Memory
from tests.support.machine.waves import Waves

Array = np.ndarray[Any, Any]
MASK = 0xFFFF_FFFF
EDGES = [
    0, 1, 2, 7, 31, 32, 0x7F, 0x80, 0xFFFF, 0x1_0000, 0x0403_0201, 0x0D0C_0B08, 0x7FFF_FFFF, 0x8000_0000, MASK,
    0x3F80_0000, 0xBF80_0000, 0x3F80_0001, 0x007F_FFFF, 0x0080_0000, 0x8000_0001, 0x7F7F_FFFF, 0x7F80_0000,
    0xFF80_0000, 0x7FC0_0000, 0x7F80_0001, 0x3380_0000, 0xC2FC_0000, 0x42FE_0000, 0x3C00_7C01,
]  # fmt: skip
"""Shifts, bytes, signs, carries; one, its neighbour, subnormal and extreme floats, infinities, a quiet and a signalling
NaN, and halves that are float16."""


def operands(count: int) -> list[Array]:
    """Registers v0, v1, … [waves, 64]: pairs of edges with every other, and random bits."""
    generator = np.random.default_rng(count)
    first, second = (part.ravel() for part in np.meshgrid(EDGES, EDGES, indexing="ij"))
    columns = [first, second, *(generator.permutation(first) for _ in range(count - 2))][:count]
    fill = -len(first) % 64 + 256
    made = [np.concatenate([column, generator.integers(0, 1 << 32, fill)]) for column in columns]
    return [column.astype(np.uint32).reshape(-1, 64) for column in made]


def one(text: str, vectors: dict[int, Array], scalars: dict[int, Array] | None = None, lanes: int = 64,
        scc: Array | None = None, on: Array | None = None) -> Waves:  # fmt: skip
    """All waves after this instruction. vectors [waves, lanes], scalars [waves]."""
    count = len(next(iter(vectors.values()))) if vectors else len(next(iter((scalars or {}).values())))
    memory, local = Memory(), Local(1, 0, count)
    waves = Waves(count, lanes, 32, np.zeros(count, np.int64), memory, local)
    for index, value in vectors.items():
        waves.put_vector(index, value.astype(np.uint32))
    for index, value in (scalars or {}).items():
        waves.put_scalar(index, value.astype(np.uint32))
    if scc is not None:
        waves.put_scc(scc)
    if on is not None:
        waves.set_exec(on)
    with np.errstate(all="ignore"):
        _Run(Program("one", "gfx942"), waves, 1)._compute(assembly.instruction(text))
    return waves


def signed(bits: int, size: int = 32) -> int:
    return bits - (1 << size) if bits >> (size - 1) else bits


def number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & MASK))[0])


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])


def nearest(exact: Fraction, digits: int = 24, lowest: int = -126, limit: int = 128) -> float:
    """To the nearest number of so many binary digits, ties to even, subnormal below 2^lowest, infinite from 2^limit."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, lowest) - digits + 1)
    found = round(exact / step) * step
    return math.copysign(math.inf, exact) if abs(found) >= Fraction(2) ** limit else math.copysign(float(found), exact)


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def half_of(value: float) -> int:
    """Bits of the nearest float16 to a float."""
    if not math.isfinite(value) or value == 0:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    near = nearest(Fraction(value), 11, -14, 16)
    return int(struct.unpack("<H", struct.pack("<e", near))[0])


def fma(a: float, b: float, c: float) -> float:
    rough = a * b + c if not ((math.isinf(a) and b == 0) or (a == 0 and math.isinf(b))) else math.nan
    if not all(math.isfinite(part) for part in (a, b, c)):
        return rough
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest(exact) if exact else rough


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def exp2(value: float) -> float:
    value = flushed(value)
    if math.isnan(value) or math.isinf(value):
        return value if math.isnan(value) or value > 0 else 0.0
    return math.inf if value >= 128 else 0.0 if value < -126 else nearest(Fraction(2.0**value))


def log2(value: float) -> float:
    value = flushed(value)
    if value == 0:
        return -math.inf
    return math.nan if value < 0 else value if not math.isfinite(value) else nearest(Fraction(math.log2(value)))


def root(value: float) -> float:
    value = flushed(value)
    if not value > 0 or math.isinf(value):
        return math.nan if value < 0 else value
    return nearest(Fraction(math.sqrt(value)))


def quotient(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if b == 0 or math.isinf(a):
        return math.copysign(math.inf, sign)
    if a == 0 or math.isinf(b):
        return math.copysign(0.0, sign)
    return math.copysign(abs(nearest(Fraction(a) / Fraction(b))), sign)
