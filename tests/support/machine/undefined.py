"""Which bits of a result depend on bits that nothing has written.

A compiler may compute with the unwritten half of a register as long as the result does not depend on it: it shifts the
half out, or adds to the low half alone. For these instructions the undefined bits are followed; every other
instruction, a comparison, an address, a store and a branch may not read any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.machine.arithmetic import field, shift
from tests.support.machine.waves import Array

Rule = Callable[[list[Array], list[Array]], Array]
"""From the values of the operands and their undefined bits, unsigned, to the undefined bits of the result."""


def upwards(bits: Array) -> Array:
    """The lowest undefined bit and all above it: where a carry can go."""
    return bits | (~bits + bits.dtype.type(1))


def _all_if(bits: Array) -> Any:
    return np.where(bits != 0, np.uint32(0xFFFF_FFFF), np.uint32(0))


def _and(v: list[Array], u: list[Array]) -> Array:
    return (u[0] | u[1]) & (v[0] | u[0]) & (v[1] | u[1])


def _or(v: list[Array], u: list[Array]) -> Array:
    return (u[0] | u[1]) & (~v[0] | u[0]) & (~v[1] | u[1])


def _shifted(v: list[Array], u: list[Array]) -> Array:
    return shift(u[1], v[0], True) | _all_if(u[0])


def _shifted_right(v: list[Array], u: list[Array]) -> Array:
    return shift(u[1], v[0], False) | _all_if(u[0])


def _shifted_arithmetically(v: list[Array], u: list[Array]) -> Array:
    return shift(u[1].view(np.int32), v[0], False).view(np.uint32) | _all_if(u[0])


def _field(signed: bool) -> Rule:
    def rule(v: list[Array], u: list[Array]) -> Array:
        of = u[0].view(np.int32) if signed else u[0]
        return field(of, v[1], v[2]).view(np.uint32) | _all_if(u[1] | u[2])

    return rule


RULES: dict[str, Rule] = {
    "v_mov_b32": lambda v, u: u[0],
    "v_mov_b16": lambda v, u: u[0],
    "v_and_b32": _and,
    "v_or_b32": _or,
    "v_lshlrev_b32": _shifted,
    "v_lshrrev_b32": _shifted_right,
    "v_ashrrev_i32": _shifted_arithmetically,
    "v_bfe_u32": _field(False),
    "v_bfe_i32": _field(True),
    "v_and_or_b32": lambda v, u: _or([v[0] & v[1], v[2]], [_and(v, u), u[2]]),
    "v_lshl_or_b32": lambda v, u: _or([shift(v[0], v[1], True), v[2]], [_shifted([v[1], v[0]], [u[1], u[0]]), u[2]]),
    "v_add_u32": lambda v, u: upwards(u[0] | u[1]),
    "v_add3_u32": lambda v, u: upwards(u[0] | u[1] | u[2]),
    "v_lshl_add_u32": lambda v, u: upwards(_shifted([v[1], v[0]], [u[1], u[0]]) | u[2]),
    "v_mul_lo_u32": lambda v, u: upwards(u[0] | u[1]),
}
