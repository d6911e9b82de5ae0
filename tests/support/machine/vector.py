"""Vector arithmetic: what each instruction computes, from the types of its operands.

The formulas are those of the pseudo-code in AMD's "RDNA3 Instruction Set Architecture" (section 16: VOP1, VOP2, VOP3,
VOP3P, VOPC, VOPD) and "AMD Instinct MI300 Instruction Set Architecture" (section 12), by the names of the instructions.
Names that only changed between generations (V_ADD_U32 and V_ADD_NC_U32) share a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.machine import arithmetic, cross, undefined
from tests.support.machine.assembly import NULL, Fault, Instruction, Operand, Unknown
from tests.support.machine.waves import BITS, TYPES, Array, Waves, width

u16, u32, u64, i32, f16, f32 = np.uint16, np.uint32, np.uint64, np.int32, np.float16, np.float32


def pack(a: Array, b: Array) -> Array:
    return a.view(u16).astype(u32) | (b.view(u16).astype(u32) << u32(16))


def wide_product(a: Array, b: Array, c: Array) -> Array:
    return a.astype(u64) * b.astype(u64) + c


Formula = Callable[..., Any]

PLAIN: dict[str, tuple[str, Formula]] = {
    # name: types of the result and the operands, formula
    "v_mov_b32": ("u32 u32", lambda a: a),
    "v_mov_b64": ("u64 u64", lambda a: a),
    "v_mov_b16": ("u16 u16", lambda a: a),
    "v_not_b32": ("u32 u32", lambda a: ~a),
    "v_bfrev_b32": ("u32 u32", arithmetic.reverse),
    "v_and_b32": ("u32 u32 u32", lambda a, b: a & b),
    "v_or_b32": ("u32 u32 u32", lambda a, b: a | b),
    "v_xor_b32": ("u32 u32 u32", lambda a, b: a ^ b),
    "v_and_or_b32": ("u32 u32 u32 u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("u32 u32 u32 u32", lambda a, b, c: a | b | c),
    "v_add_u32": ("u32 u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32 u32 u32", lambda a, b: a - b),
    "v_add3_u32": ("u32 u32 u32 u32", lambda a, b, c: a + b + c),
    "v_mul_lo_u32": ("u32 u32 u32", lambda a, b: a * b),
    "v_lshlrev_b32": ("u32 u32 u32", lambda a, b: arithmetic.shift(b, a, True)),
    "v_lshrrev_b32": ("u32 u32 u32", lambda a, b: arithmetic.shift(b, a, False)),
    "v_ashrrev_i32": ("i32 i32 i32", lambda a, b: arithmetic.shift(b, a, False)),
    "v_lshrrev_b16": ("u16 u16 u16", lambda a, b: arithmetic.shift(b, a, False)),
    "v_ashrrev_i16": ("i16 i16 i16", lambda a, b: arithmetic.shift(b, a, False)),
    "v_lshl_add_u32": ("u32 u32 u32 u32", lambda a, b, c: arithmetic.shift(a, b, True) + c),
    "v_add_lshl_u32": ("u32 u32 u32 u32", lambda a, b, c: arithmetic.shift(a + b, c, True)),
    "v_xad_u32": ("u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_or_b32": ("u32 u32 u32 u32", lambda a, b, c: arithmetic.shift(a, b, True) | c),
    "v_lshl_add_u64": ("u64 u64 u32 u64", lambda a, b, c: arithmetic.shift(a, b & u32(7), True) + c),
    "v_bfe_u32": ("u32 u32 u32 u32", arithmetic.field),
    "v_bfe_i32": ("i32 i32 u32 u32", arithmetic.field),
    "v_alignbit_b32": (
        "u32 u32 u32 u32",
        lambda a, b, c: (((a.astype(u64) << u64(32)) | b) >> (c & u32(31)).astype(u64)).astype(u32),
    ),
    "v_perm_b32": ("u32 u32 u32 u32", arithmetic.permute),
    "v_pack_b32_f16": ("u32 f16 f16", pack),
    "v_add_f32": ("f32 f32 f32", lambda a, b: a + b),
    "v_sub_f32": ("f32 f32 f32", lambda a, b: a - b),
    "v_subrev_f32": ("f32 f32 f32", lambda a, b: b - a),
    "v_mul_f32": ("f32 f32 f32", lambda a, b: a * b),
    "v_fma_f32": ("f32 f32 f32 f32", arithmetic.fma),
    "v_fmamk_f32": ("f32 f32 f32 f32", arithmetic.fma),
    "v_max_f32": ("f32 f32 f32", arithmetic.larger),
    "v_max3_f32": ("f32 f32 f32 f32", lambda a, b, c: arithmetic.larger(arithmetic.larger(a, b), c)),
    "v_exp_f32": ("f32 f32", arithmetic.exp2),
    "v_log_f32": ("f32 f32", arithmetic.log2),
    "v_rcp_f32": ("f32 f32", arithmetic.reciprocal),
    "v_sqrt_f32": ("f32 f32", arithmetic.root),
    "v_ldexp_f32": ("f32 f32 i32", arithmetic.ldexp),
    "v_div_fixup_f32": ("f32 f32 f32 f32", arithmetic.div_fixup),
    "v_cvt_f16_f32": ("f16 f32", lambda a: a.astype(f16)),
    "v_cvt_f32_f16": ("f32 f16", lambda a: a.astype(f32)),
    "v_cvt_f32_i32": ("f32 i32", lambda a: a.astype(f32)),
    "v_cvt_u32_u16": ("u32 u16", lambda a: a.astype(u32)),
}
SAME = {
    "v_add_nc_u32": "v_add_u32", "v_sub_nc_u32": "v_sub_u32", "v_subrev_nc_u32": "v_subrev_u32",
    "v_max_num_f32": "v_max_f32", "v_min_num_f32": "v_min_f32", "v_max3_num_f32": "v_max3_f32",
    "v_mad_co_u64_u32": "v_mad_u64_u32",
}  # fmt: skip

COMPARE: dict[str, Formula] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": lambda a, b: ~(a == b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
}
PACKED: dict[str, Formula] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": arithmetic.fma,
}
MODIFIERS = {
    "sdwa": {"dst_sel", "dst_unused", "src0_sel", "src1_sel"},
    "packed": {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"},
}


def execute(waves: Waves, ins: Instruction) -> bool:
    """Execute it if it is a vector instruction, and say whether it was."""
    writes = results(waves, ins)
    if writes is None:
        return False
    if ins.other is not None:  # both halves read before either writes
        second = results(waves, ins.other)
        if second is None:
            raise Unknown(ins.other.text)
        writes = [*writes, *second]
    for write in writes:
        if write.kind == "mask":
            waves.put_mask(write.operand, write.value)
        elif write.kind == "exec":
            waves.set_exec(write.value & waves.exec)
        else:
            waves.put(write.operand, write.value, write.kind, write.undefined)
    return True


@dataclass(frozen=True, slots=True)
class Write:
    operand: Operand
    value: Array
    kind: str
    """A type, or `mask` (a bit a lane to a scalar register) or `exec`."""
    undefined: Array | None = None
    """The bits that depend on what nothing has written."""


def results(waves: Waves, ins: Instruction) -> list[Write] | None:
    """What the instruction is to write, computed and not yet written."""
    name, ops = SAME.get(ins.name, ins.name), ins.operands
    if name in PLAIN:
        types, formula = PLAIN[name]
        result, *kinds = types.split()
        if name in undefined.RULES and not ins.modifiers:
            return [_traced(waves, ins, undefined.RULES[name], formula, result, kinds)]
        value = formula(*_sources(waves, ins, ops[1:], kinds))
        if cross.uses_dpp(ins):
            return _only_where(waves, ins, ops[0], value, result)
        return [Write(ops[0], value, result)]
    if found := re.fullmatch(r"v_cmp(x?)_([a-z]+)_([uif]\d+)", name):
        return _compare(waves, ins, found[1] == "x", found[2], found[3])
    if name in PACKED:
        return _packed(waves, ins, PACKED[name])
    special = SPECIAL.get(name)
    return None if special is None else special(waves, ins)


def _traced(waves: Waves, ins: Instruction, rule: Formula, formula: Formula, result: str, kinds: list[str]) -> Write:
    """A result of which some bits may depend on what nothing has written."""
    target, *sources = ins.operands
    if len(sources) != len(kinds):
        raise Unknown(f"{ins.text}: {len(sources)} sources, expected {len(kinds)}")
    missing = [waves.undefined(source, kind) for source, kind in zip(sources, kinds, strict=True)]
    values = [waves.value(source, kind, loose=True) for source, kind in zip(sources, kinds, strict=True)]
    if all(bits is None for bits in missing):
        return Write(target, formula(*values), result)
    plain = [value.view(BITS[width(kind)]) for value, kind in zip(values, kinds, strict=True)]
    bits = rule(
        plain, [np.zeros(1, value.dtype) if one is None else one for value, one in zip(plain, missing, strict=True)]
    )
    shape = (waves.count, waves.lanes)
    return Write(target, formula(*values), result, np.broadcast_to(bits, shape).astype(BITS[width(result)]))


def _sources(waves: Waves, ins: Instruction, operands: tuple[Operand, ...], kinds: list[str]) -> list[Array]:
    if len(operands) != len(kinds):
        raise Unknown(f"{ins.text}: {len(operands)} sources, expected {len(kinds)}")
    sdwa = "src0_sel" in ins.modifiers or "src1_sel" in ins.modifiers
    if sdwa:
        return _subdwords(waves, ins, operands, kinds)
    values = []
    for place, (operand, kind) in enumerate(zip(operands, kinds, strict=True)):
        if place == 0 and cross.uses_dpp(ins):
            values.append(cross.moved(waves, ins, operand).view(TYPES[kind]))
        else:
            values.append(waves.value(operand, kind))
    known = cross.DPP_MODIFIERS if cross.uses_dpp(ins) else set()
    _only(ins, known)
    return values


def _only(ins: Instruction, known: set[str]) -> None:
    if more := set(ins.modifiers) - known:
        raise Unknown(f"{ins.text}: modifier {', '.join(sorted(more))}")


def _subdwords(waves: Waves, ins: Instruction, operands: tuple[Operand, ...], kinds: list[str]) -> list[Array]:
    """SDWA: each source is a byte or word of its register, zero- or sign-extended."""
    _only(ins, MODIFIERS["sdwa"])
    if (
        ins.modifiers.get("dst_sel", "DWORD") != "DWORD"
        or ins.modifiers.get("dst_unused", "UNUSED_PAD") != "UNUSED_PAD"
    ):
        raise Unknown(f"{ins.text}: it writes a part of its register")
    values = []
    for place, (operand, kind) in enumerate(zip(operands, kinds, strict=True)):
        part = ins.modifiers.get(f"src{place}_sel", "DWORD")
        if operand.negate or operand.absolute:
            raise Unknown(f"{ins.text}: a sign on a part of a register")
        bits = waves.value(operand, "u32")
        if part != "DWORD":
            what, number = part.split("_")
            size = {"BYTE": 8, "WORD": 16}[what]
            bits = (bits >> u32(size * int(number))) & u32((1 << size) - 1)
            if operand.sign_extend:
                bits = (bits ^ u32(1 << (size - 1))) - u32(1 << (size - 1))
        size = int(kind[1:])
        values.append(np.ascontiguousarray(bits.astype(BITS[size])).view(TYPES[kind]))
    return values


def _only_where(waves: Waves, ins: Instruction, target: Operand, value: Array, kind: str) -> list[Write]:
    """DPP: lanes whose row or source is left out keep what they have."""
    keep = ~cross.written(waves, ins)
    if not (keep & waves.on).any():
        return [Write(target, value, kind)]
    on = waves.on & ~keep
    waves.put_vector(target.index, np.ascontiguousarray(value.astype(TYPES[kind])).view(u32), on=on)
    return []


def _compare(waves: Waves, ins: Instruction, to_exec: bool, relation: str, kind: str) -> list[Write]:
    ops = ins.operands
    sources = ops if to_exec and len(ops) == 2 else ops[1:]
    a, b = _sources(waves, ins, sources, [kind, kind])
    found = np.broadcast_to(COMPARE[relation](a, b), (waves.count, waves.lanes))
    if to_exec:
        if len(ops) != 2:
            raise Unknown(f"{ins.text}: it writes a mask and EXEC")
        return [Write(ops[0], found, "exec")]
    return [Write(ops[0], found, "mask")]


def _bits_of(ins: Instruction, name: str, count: int, default: int) -> list[int]:
    given = re.findall(r"\d", ins.modifiers[name]) if name in ins.modifiers else []
    return [*(int(bit) for bit in given), *[default] * (count - len(given))]


def _packed(waves: Waves, ins: Instruction, formula: Formula) -> list[Write]:
    """Two float32 operations at once; OP_SEL and OP_SEL_HI choose which half of each source goes into each."""
    _only(ins, MODIFIERS["packed"])
    sources = ins.operands[1:]
    halves = []
    for select, sign, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        which, negate = _bits_of(ins, select, len(sources), default), _bits_of(ins, sign, len(sources), 0)
        values = []
        for source, high, negative in zip(sources, which, negate, strict=True):
            value = waves.value(_half_of(ins, source, high), "f32")
            values.append(-value if negative else value)
        halves.append(np.broadcast_to(formula(*values), (waves.count, waves.lanes)).astype(f32).view(u32).astype(u64))
    return [Write(ins.operands[0], halves[0] | (halves[1] << u64(32)), "u64")]


def _half_of(ins: Instruction, source: Operand, high: int) -> Operand:
    if source.kind == "literal":
        if high:
            raise Unknown(f"{ins.text}: the high half of a constant")
        return source
    return Operand(source.text, source.kind, source.index + high)


def _packed_mov(waves: Waves, ins: Instruction) -> list[Write]:
    _only(ins, MODIFIERS["packed"])
    low, high = _bits_of(ins, "op_sel", 2, 0)
    parts = [waves.value(_half_of(ins, op, bit), "u32") for op, bit in zip(ins.operands[1:], (low, high), strict=True)]
    whole = [np.broadcast_to(part, (waves.count, waves.lanes)).astype(u64) for part in parts]
    return [Write(ins.operands[0], whole[0] | (whole[1] << u64(32)), "u64")]


def _mixed(waves: Waves, ins: Instruction) -> list[Write]:
    """V_FMA_MIX: OP_SEL_HI makes a source float16, OP_SEL takes it from the register's high half."""
    _only(ins, MODIFIERS["packed"] - {"neg_lo", "neg_hi"})
    sources = ins.operands[1:]
    halves, highs = _bits_of(ins, "op_sel_hi", 3, 0), _bits_of(ins, "op_sel", 3, 0)
    values = []
    for source, half, high in zip(sources, halves, highs, strict=True):
        if half:
            part = Operand(source.text, source.kind, source.index, 1, source.value, half="h" if high else "l")
            value = waves.value(part, "f16").astype(f32)
            value = np.abs(value) if source.absolute else value
            values.append(-value if source.negate else value)
        else:
            values.append(waves.value(source, "f32"))
    found = arithmetic.fma(*values)
    if ins.name == "v_fma_mix_f32":
        return [Write(ins.operands[0], found, "f32")]
    target = ins.operands[0]
    half = "h" if ins.name == "v_fma_mixhi_f16" else "l"
    return [Write(Operand(target.text, "v", target.index, half=half), found.astype(f16), "f16")]


def _select(kind: str) -> Formula:
    def select(waves: Waves, ins: Instruction) -> list[Write]:
        """V_CNDMASK: the second source where the lane's bit is set, else the first. VCC where no mask is named. Of the
        other source a lane may hold anything."""
        target, *sources = ins.operands
        mask = waves.mask(sources[2]) if len(sources) == 3 else waves.vcc()
        values, missing = [], []
        if ins.modifiers:
            before = waves.on
            for place, lanes in enumerate((~mask, mask)):
                waves.on = before & lanes
                alone = [Operand("0", "literal"), sources[1]] if place else [sources[0], Operand("0", "literal")]
                values.append(_sources(waves, ins, tuple(alone), [kind, kind])[place])
                waves.on = before
            return [Write(target, np.where(mask, values[1], values[0]), kind)]
        for source in sources[:2]:
            bits = waves.undefined(source, kind)
            missing.append(np.zeros(1, BITS[width(kind)]) if bits is None else bits)
            values.append(waves.value(source, kind, loose=True))
        found, bits = np.where(mask, values[1], values[0]), np.where(mask, missing[1], missing[0])
        return [Write(target, found, kind, bits if bits.any() else None)]

    return select


def _fmac(waves: Waves, ins: Instruction) -> list[Write]:
    target, *sources = ins.operands
    a, b = _sources(waves, ins, tuple(sources), ["f32", "f32"])
    return [Write(target, arithmetic.fma(a, b, waves.value(target, "f32")), "f32")]


def _mad(waves: Waves, ins: Instruction) -> list[Write]:
    """V_MAD_U64_U32: the carry out of 64 bits goes to the scalar operand."""
    target, carry, *sources = ins.operands
    a, b = _sources(waves, ins, tuple(sources[:2]), ["u32", "u32"])
    c, missing = waves.value(sources[2], "u64", loose=True), waves.undefined(sources[2], "u64")
    total = np.broadcast_to(wide_product(a, b, c), (waves.count, waves.lanes))
    writes = [Write(target, total, "u64", None if missing is None else undefined.upwards(missing))]
    if carry.index != NULL:
        if missing is not None:
            raise Fault("the carry depends on what nothing has written")
        writes.append(Write(carry, total < c, "mask"))
    return writes


def _div_scale(waves: Waves, ins: Instruction) -> list[Write]:
    target, scaled, *sources = ins.operands
    values = _sources(waves, ins, tuple(sources), ["f32"] * 3)
    shape = (waves.count, waves.lanes)
    found, flag = arithmetic.div_scale(*(np.broadcast_to(value, shape) for value in values))
    return [Write(target, found, "f32"), Write(scaled, flag, "mask")]


def _div_fmas(waves: Waves, ins: Instruction) -> list[Write]:
    target, *sources = ins.operands
    shape = (waves.count, waves.lanes)
    values = (np.broadcast_to(value, shape) for value in _sources(waves, ins, tuple(sources), ["f32"] * 3))
    return [Write(target, arithmetic.div_fmas(*values, waves.vcc()), "f32")]


def _carry(subtract: bool, takes: bool) -> Formula:
    def add(waves: Waves, ins: Instruction) -> list[Write]:
        target, out, *sources = ins.operands
        _only(ins, set())
        a, b = (waves.value(source, "u32").astype(np.int64) for source in sources[:2])
        given = waves.mask(sources[2]).astype(np.int64) if takes else 0
        total = a - b - given if subtract else a + b + given
        total = np.broadcast_to(total, (waves.count, waves.lanes))
        return [Write(target, total.astype(u32), "u32"), Write(out, (total < 0) | (total >> 32 > 0), "mask")]

    return add


SPECIAL: dict[str, Callable[[Waves, Instruction], list[Write]]] = {
    "v_cndmask_b32": _select("u32"),
    "v_cndmask_b16": _select("u16"),
    "v_fmac_f32": _fmac,
    "v_pk_mov_b32": _packed_mov,
    "v_fma_mix_f32": _mixed,
    "v_fma_mixlo_f16": _mixed,
    "v_fma_mixhi_f16": _mixed,
    "v_mad_u64_u32": _mad,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_add_co_u32": _carry(False, False),
    "v_addc_co_u32": _carry(False, True),
    "v_add_co_ci_u32": _carry(False, True),
}
