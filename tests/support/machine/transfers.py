"""Loads and stores: buffer, global, scalar and local memory.

Buffer addressing and range checking is in RDNA3's ISA, 9.1 and 9.4 (raw buffers), and in MI300's, 9.1; local memory in
RDNA3's, 12, and MI300's, 11. What a buffer descriptor turns away reads as 0 and is not stored, as on the hardware; an
address that it lets through has to be in a buffer that the launch was given.
"""

from __future__ import annotations

import re

import numpy as np

from tests.support.machine.assembly import Fault, Instruction, Unknown
from tests.support.machine.cross import permute_backwards
from tests.support.machine.waves import HIGH, LOW, WHOLE, Array, Waves

BYTES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "dwordx16": 64,
    "b32": 4, "b64": 8, "b96": 12, "b128": 16, "b256": 32, "b512": 64,
    "ubyte": 1, "u8": 1, "sbyte": 1, "i8": 1, "byte": 1, "b8": 1,
    "ushort": 2, "u16": 2, "sshort": 2, "i16": 2, "short": 2, "b16": 2,
    "short_d16": 2, "d16_b16": 2, "short_d16_hi": 2, "d16_hi_b16": 2, "u16_d16": 2, "u16_d16_hi": 2,
    "b16_d16_hi": 2,
}  # fmt: skip
SIGNED = ("sbyte", "i8", "sshort", "i16")
PARTS = {
    "short_d16": LOW,
    "d16_b16": LOW,
    "u16_d16": LOW,
    "short_d16_hi": HIGH,
    "d16_hi_b16": HIGH,
    "u16_d16_hi": HIGH,
    "b16_d16_hi": HIGH,
}
CACHE = {"sc0", "sc1", "nt", "glc", "slc", "dlc", "th", "scope"}
"""Cache policy: without a meaning here."""


def execute(waves: Waves, ins: Instruction) -> bool:
    """Execute it if it is a transfer, and say whether it was."""
    if ins.name == "ds_bpermute_b32":
        permute_backwards(waves, ins)
        return True
    if found := re.fullmatch(r"ds_(load|store|read|write)_?2(?:addr)?(_stride64|st64)?_b(32|64)", ins.name):
        _two(waves, ins, found[1] in ("load", "read"), int(found[3]) // 8, 64 if found[2] else 1)
        return True
    found = re.fullmatch(r"(buffer|global|ds|s)_(load|store|read|write)_(\w+)", ins.name)
    if found is None or found[3] not in BYTES:
        return False
    space, load, form = found[1], found[2] in ("load", "read"), found[3]
    if space == "s":
        _scalar(waves, ins, BYTES[form])
    elif space == "ds":
        _local(waves, ins, load, form)
    else:
        address, on = (_buffer if space == "buffer" else _global)(waves, ins, load, BYTES[form])
        if load:
            _fill(waves, ins.operands[0].index, ins.operands[0].half, waves.memory.load(address, on, BYTES[form]), form)
        else:
            place = ins.operands[0] if space == "buffer" else ins.operands[1]
            values = _given(waves, place.index, place.half, BYTES[form], form, on)
            waves.memory.store(address, on, values)
    return True


def _offset(ins: Instruction, known: set[str]) -> int:
    if more := set(ins.modifiers) - known - {"offset"}:
        raise Unknown(f"{ins.text}: modifier {', '.join(sorted(more))}")
    return int(ins.modifiers.get("offset", "0"), 0)


def _buffer(waves: Waves, ins: Instruction, load: bool, size: int) -> tuple[Array, Array]:
    """A raw buffer: base + scalar offset + lane's offset + constant, turned away where that reaches NUM_RECORDS."""
    offset = _offset(ins, CACHE | {"offen"})
    _, lane, resource, scalar = ins.operands
    words = [waves.scalar_bits(resource.index + place, 1) for place in range(4)]
    if (((words[1] >> np.uint32(16)) != 0) & waves.running).any():
        raise Unknown(f"{ins.text}: a buffer with a stride or swizzle")
    base = words[0].astype(np.uint64) | ((words[1] & np.uint32(0xFFFF)).astype(np.uint64) << np.uint64(32))
    at = np.zeros((waves.count, waves.lanes), np.uint64) + np.uint64(offset)
    if "offen" in ins.modifiers:
        at = at + waves.value(lane, "u32").astype(np.uint64)
    at = at + np.broadcast_to(waves.value(scalar, "u32", scalar=True), (waves.count,)).astype(np.uint64)[:, None]
    records = words[2].astype(np.uint64)[:, None]
    inside = at + np.uint64(size) <= records
    cut = waves.on & ~inside & (at < records)
    if cut.any():
        raise Fault(
            f"{'reads' if load else 'writes'} across the end of a buffer of {int(records[cut.any(axis=1)][0, 0])} bytes"
        )
    return base[:, None] + at, waves.on & inside


def _global(waves: Waves, ins: Instruction, load: bool, size: int) -> tuple[Array, Array]:
    """A 64-bit address of each lane, or a scalar one and 32 bits of each lane."""
    offset = _offset(ins, CACHE)
    address, base = (ins.operands[1 if load else 0], ins.operands[2])
    if base.kind == "s":
        at = waves.value(base, "u64") + waves.value(address, "u32").astype(np.uint64)
    else:
        at = waves.value(address, "u64")
    at = np.broadcast_to(at, waves.on.shape) + np.array(offset, np.int64).astype(np.uint64)
    return at, waves.on


def _fill(waves: Waves, index: int, half: str, found: Array, form: str) -> None:
    """Loaded bytes [waves, lanes, size] into registers."""
    size = found.shape[-1]
    if size >= 4:
        words = np.ascontiguousarray(found).view("<u4")
        for place in range(size // 4):
            waves.put_vector(index + place, words[..., place])
        return
    bits = np.zeros(found.shape[:-1], np.uint32)
    for place in range(size):
        bits |= found[..., place].astype(np.uint32) << np.uint32(8 * place)
    if form in SIGNED:
        sign = np.uint32(1 << (8 * size - 1))
        bits = (bits ^ sign) - sign
    parts = {"": PARTS.get(form, WHOLE), "l": LOW, "h": HIGH}[half]
    waves.put_vector(index, bits, parts)


def _given(waves: Waves, index: int, half: str, size: int, form: str, on: Array) -> Array:
    """Bytes [waves, lanes, size] to store, from registers."""
    if size >= 4:
        words = [waves.vector_bits(index + place, on=on) for place in range(size // 4)]
        return np.ascontiguousarray(np.stack(words, axis=-1)).view(np.uint8)
    part = {"": PARTS.get(form, LOW), "l": LOW, "h": HIGH}[half]
    bits = waves.vector_bits(index, parts=part, on=on)
    bits = bits >> np.uint32(16) if part == HIGH else bits
    return np.ascontiguousarray(bits).view(np.uint8).reshape(*bits.shape, 4)[..., :size]


def _scalar(waves: Waves, ins: Instruction, size: int) -> None:
    target, base, by = ins.operands
    offset = _offset(ins, CACHE)
    at = np.broadcast_to(waves.value(by, "u32", scalar=True), (waves.count,)).astype(np.int64) + offset
    address = (waves.scalar_bits(base.index, 2) + at.astype(np.uint64)) & ~np.uint64(3)
    found = waves.memory.load(address[:, None], waves.running[:, None], size)
    words = np.ascontiguousarray(found[:, 0]).view("<u4")
    for place in range(size // 4):
        waves.put_scalar(target.index + place, words[:, place])


def _local(waves: Waves, ins: Instruction, load: bool, form: str) -> None:
    size, offset = BYTES[form], _offset(ins, set())
    at = waves.value(ins.operands[1 if load else 0], "u32").astype(np.int64) + offset
    at = np.broadcast_to(at, waves.on.shape)
    who = (waves.number, waves.group_of, waves.epoch)
    if load:
        target = ins.operands[0]
        _fill(waves, target.index, target.half, waves.local.load(*who, at, waves.on, size), form)
    else:
        source = ins.operands[1]
        waves.local.store(*who, at, waves.on, _given(waves, source.index, source.half, size, form, waves.on))


def _two(waves: Waves, ins: Instruction, load: bool, size: int, stride: int) -> None:
    """DS_READ2, DS_WRITE2: two places, whose offsets are counted in elements, or in 64 elements."""
    if more := set(ins.modifiers) - {"offset0", "offset1"}:
        raise Unknown(f"{ins.text}: modifier {', '.join(sorted(more))}")
    base = waves.value(ins.operands[1 if load else 0], "u32").astype(np.int64)
    who = (waves.number, waves.group_of, waves.epoch)
    places = []
    for name in ("offset0", "offset1"):
        at = base + int(ins.modifiers.get(name, "0"), 0) * size * stride
        places.append(np.broadcast_to(at, waves.on.shape))
    if load:
        found = [waves.local.load(*who, at, waves.on, size) for at in places]
        _fill(waves, ins.operands[0].index, "", np.concatenate(found, axis=-1), "")
    else:
        for at, source in zip(places, ins.operands[1:], strict=True):
            waves.local.store(*who, at, waves.on, _given(waves, source.index, "", size, "", waves.on))
