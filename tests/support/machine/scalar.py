"""Scalar arithmetic: what each instruction computes for a wave, and what it leaves in SCC.

The formulas are those of the pseudo-code in AMD's "RDNA3 Instruction Set Architecture", 16.1 to 16.5 (SOP2, SOPK, SOP1,
SOPC), RDNA4's for the float forms, and "AMD Instinct MI300 Instruction Set Architecture", 12.1 to 12.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.machine import arithmetic
from tests.support.machine.arithmetic import shift
from tests.support.machine.assembly import EXEC, Instruction, Unknown
from tests.support.machine.vector import COMPARE
from tests.support.machine.waves import BITS, TYPES, Array, Waves, width

u32, u64 = np.uint32, np.uint64
Formula = Callable[..., Any]


def _nonzero(result: Array, *given: Array) -> Array:
    return result != 0


def _carry(result: Array, a: Array, b: Array) -> Array:
    return a.astype(u64) + b.astype(u64) > u64(0xFFFF_FFFF)


def _signed_overflow(result: Array, a: Array, b: Array) -> Array:
    exact = a.astype(np.int64) + b.astype(np.int64)
    return exact != result.astype(np.int64)


def _difference_overflow(result: Array, a: Array, b: Array) -> Array:
    return a.astype(np.int64) - b.astype(np.int64) != result.astype(np.int64)


def _shifted_carry(by: int) -> Formula:
    return lambda result, a, b: (a.astype(u64) << u64(by)) + b.astype(u64) > u64(0xFFFF_FFFF)


def _field(value: Array, control: Array) -> Array:
    """S_BFE: offset in bits 4:0, width in bits 22:16 of the second operand."""
    at, size = (
        (control & u32(31)).astype(np.int64),
        np.minimum((control >> u32(16)) & u32(0x7F), u32(32)).astype(np.int64),
    )
    cut = (value.astype(np.int64) >> at) & ((np.int64(1) << size) - 1)
    if value.dtype == np.int32:
        sign = np.where(size > 0, np.int64(1) << np.maximum(size - 1, 0), np.int64(0))
        cut = (cut ^ sign) - sign
    return cut.astype(value.dtype)


TABLE: dict[str, tuple[str, Formula, Formula | None]] = {
    # name: types of the result and the operands, formula, SCC from (result, operands…)
    "s_mov_b32": ("u32 u32", lambda a: a, None),
    "s_mov_b64": ("u64 u64", lambda a: a, None),
    "s_add_u32": ("u32 u32 u32", lambda a, b: a + b, _carry),
    "s_add_i32": ("i32 i32 i32", lambda a, b: a + b, _signed_overflow),
    "s_mul_i32": ("u32 u32 u32", lambda a, b: a * b, None),
    "s_mul_hi_i32": (
        "i32 i32 i32",
        lambda a, b: (a.astype(np.int64) * b.astype(np.int64) >> 32).astype(np.int32),
        None,
    ),
    "s_lshl1_add_u32": ("u32 u32 u32", lambda a, b: (a << u32(1)) + b, _shifted_carry(1)),
    "s_lshl2_add_u32": ("u32 u32 u32", lambda a, b: (a << u32(2)) + b, _shifted_carry(2)),
    "s_lshl3_add_u32": ("u32 u32 u32", lambda a, b: (a << u32(3)) + b, _shifted_carry(3)),
    "s_lshl4_add_u32": ("u32 u32 u32", lambda a, b: (a << u32(4)) + b, _shifted_carry(4)),
    "s_lshl_b32": ("u32 u32 u32", lambda a, b: shift(a, b, True), _nonzero),
    "s_lshr_b32": ("u32 u32 u32", lambda a, b: shift(a, b, False), _nonzero),
    "s_ashr_i32": ("i32 i32 u32", lambda a, b: shift(a, b, False), _nonzero),
    "s_lshl_b64": ("u64 u64 u32", lambda a, b: shift(a, b, True), _nonzero),
    "s_ashr_i64": ("i64 i64 u32", lambda a, b: shift(a, b, False), _nonzero),
    "s_bfe_u32": ("u32 u32 u32", _field, _nonzero),
    "s_bfe_i32": ("i32 i32 u32", _field, _nonzero),
    "s_add_nc_u64": ("u64 u64 u64", lambda a, b: a + b, None),
    "s_mul_u64": ("u64 u64 u64", lambda a, b: a * b, None),
    "s_add_f32": ("f32 f32 f32", lambda a, b: a + b, None),
    "s_sub_f32": ("f32 f32 f32", lambda a, b: a - b, None),
    "s_mul_f32": ("f32 f32 f32", lambda a, b: a * b, None),
    "s_cvt_f32_i32": ("f32 i32", lambda a: a.astype(np.float32), None),
    "v_s_exp_f32": ("f32 f32", arithmetic.exp2, None),
}
for _size in ("b32", "b64"):
    _types = f"u{_size[1:]} u{_size[1:]} u{_size[1:]}"
    TABLE |= {
        f"s_and_{_size}": (_types, lambda a, b: a & b, _nonzero),
        f"s_or_{_size}": (_types, lambda a, b: a | b, _nonzero),
        f"s_xor_{_size}": (_types, lambda a, b: a ^ b, _nonzero),
        f"s_andn2_{_size}": (_types, lambda a, b: a & ~b, _nonzero),
    }
SAME = {
    "s_add_co_u32": "s_add_u32", "s_sub_co_u32": "s_sub_u32", "s_add_co_i32": "s_add_i32", "s_sub_co_i32": "s_sub_i32",
    "s_addk_co_i32": "s_addk_i32", "s_add_co_ci_u32": "s_addc_u32", "s_sub_co_ci_u32": "s_subb_u32",
    "s_and_not1_b32": "s_andn2_b32", "s_and_not1_b64": "s_andn2_b64", "s_or_not1_b32": "s_orn2_b32",
    "s_or_not1_b64": "s_orn2_b64", "s_and_not1_saveexec_b32": "s_andn2_saveexec_b32",
}  # fmt: skip
SAVED: dict[str, Formula] = {
    "and": lambda source, before: source & before,
    "or": lambda source, before: source | before,
    "xor": lambda source, before: source ^ before,
    "andn2": lambda source, before: source & ~before,
}


def execute(waves: Waves, ins: Instruction) -> bool:
    """Execute it if it is a scalar instruction that neither branches nor touches memory, and say whether it was."""
    name, ops = SAME.get(ins.name, ins.name), ins.operands
    if ins.modifiers:
        return False
    if name in TABLE:
        types, formula, flag = TABLE[name]
        result, *kinds = types.split()
        if len(kinds) != len(ops) - 1:
            raise Unknown(ins.text)
        values = [_take(waves, ins, place + 1, kind) for place, kind in enumerate(kinds)]
        found = formula(*values)
        _put(waves, ins, found, result)
        if flag is not None:
            waves.put_scc(np.broadcast_to(flag(found, *values), (waves.count,)))
    elif found := re.fullmatch(r"s_cmp_([a-z]+)_([uif]\d+|b32)", name):
        kind = found[2].replace("b", "u")
        a, b = (_take(waves, ins, place, kind) for place in (0, 1))
        relation = "ne" if found[1] == "lg" and kind[0] != "f" else found[1]
        waves.put_scc(np.broadcast_to(COMPARE[relation](a, b), (waves.count,)))
    elif found := re.fullmatch(r"s_bitcmp([01])_b(32|64)", name):
        word, place = _take(waves, ins, 0, f"u{found[2]}"), _take(waves, ins, 1, "u32")
        bit = shift(word, place, False) & word.dtype.type(1)
        waves.put_scc(np.broadcast_to(bit == int(found[1]), (waves.count,)))
    elif name in ("s_cselect_b32", "s_cselect_b64"):
        kind = f"u{name[-2:]}"
        a, b = (_take(waves, ins, place, kind) for place in (1, 2))
        _put(waves, ins, np.where(waves.get_scc(), a, b), kind)
    elif name == "s_movk_i32":
        _put(waves, ins, np.full(waves.count, _short(ins), np.int32), "i32")
    elif name in ("s_addk_i32", "s_mulk_i32"):
        before = _take(waves, ins, 0, "i32")
        by = np.full(1, _short(ins), np.int32)
        found = before + by if name == "s_addk_i32" else before * by
        _put(waves, ins, found, "i32")
        if name == "s_addk_i32":
            waves.put_scc(_signed_overflow(found, before, by))
    elif name in ("s_addc_u32", "s_subb_u32"):
        a, b = (_take(waves, ins, place, "u32").astype(np.int64) for place in (1, 2))
        given = waves.get_scc().astype(np.int64)
        total = a + b + given if name == "s_addc_u32" else a - b - given
        _put(waves, ins, total.astype(u32), "u32")
        waves.put_scc((total < 0) | (total > 0xFFFF_FFFF))
    elif found := re.fullmatch(r"s_(and|or|xor|andn2)_saveexec_b(32|64)", name):
        count = int(found[2]) // 32
        source, before = _take(waves, ins, 1, f"u{found[2]}"), waves.scalar_bits(EXEC, count)
        after = SAVED[found[1]](source, before)
        _put(waves, ins, before, f"u{found[2]}")
        waves.put_scalar(EXEC, after, count)
        waves.put_scc(np.broadcast_to(after != 0, (waves.count,)))
    else:
        return False
    return True


def _take(waves: Waves, ins: Instruction, place: int, kind: str) -> Array:
    operand = ins.operands[place]
    if operand.kind == "v":
        raise Unknown(f"{ins.text}: a vector register in a scalar instruction")
    return waves.value(operand, kind, scalar=True)


def _put(waves: Waves, ins: Instruction, value: Array, kind: str) -> None:
    bits = np.ascontiguousarray(value.astype(TYPES[kind], copy=False)).view(BITS[width(kind)])
    waves.put_scalar(ins.operands[0].index, bits, width(kind) // 32)


def _short(ins: Instruction) -> int:
    value = int(ins.operands[1].value) & 0xFFFF
    return value - 0x10000 if value & 0x8000 else value
