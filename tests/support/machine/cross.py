"""Instructions whose lanes read one another: DPP, reads of a lane, permutations.

Data-parallel primitives are in RDNA3's ISA, 7.7 (DPP16), and in MI300's, 6.5; V_PERMLANEX16_B32 in RDNA3's, 16.12;
DS_BPERMUTE_B32 in both, section DS.
"""

from __future__ import annotations

import re

import numpy as np

from tests.support.machine.assembly import Instruction, Operand, Unknown
from tests.support.machine.waves import Array, Waves

DPP_MODIFIERS = {
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_share",
    "row_xmask", "row_mask", "bank_mask", "bound_ctrl", "fi",
}  # fmt: skip
CONTROLS = DPP_MODIFIERS - {"row_mask", "bank_mask", "bound_ctrl", "fi"}


def uses_dpp(ins: Instruction) -> bool:
    return not CONTROLS.isdisjoint(ins.modifiers)


def sources(ins: Instruction, lanes: int) -> Array:
    """The lane that each lane reads, -1 where there is none."""
    (control,) = CONTROLS & set(ins.modifiers)
    given = [int(number) for number in re.findall(r"\d+", ins.modifiers[control])]
    lane = np.arange(lanes)
    row, place = lane // 16 * 16, lane % 16
    n = given[0] if given else 0
    if control == "quad_perm":
        return lane // 4 * 4 + np.array(given)[lane % 4]
    if control == "row_shl":
        return np.where(place + n < 16, lane + n, -1)
    if control == "row_shr":
        return np.where(place >= n, lane - n, -1)
    if control == "row_bcast":  # of gfx9: the last lane of a row, or of two, goes to the next row, or to all beyond
        return np.where(row > 0, row - 1, -1) if n == 15 else np.where(lane >= 32, 31, -1)
    within = {
        "row_ror": (place - n) % 16,
        "row_mirror": 15 - place,
        "row_half_mirror": place // 8 * 8 + 7 - place % 8,
        "row_share": np.full(lanes, n),
        "row_xmask": place ^ n,
    }
    return row + within[control]


def _valid(waves: Waves, ins: Instruction) -> tuple[Array, Array]:
    lane = sources(ins, waves.lanes)
    there = np.broadcast_to(lane >= 0, waves.exec.shape)
    enabled = waves.exec[:, np.maximum(lane, 0)] | (ins.modifiers.get("fi") == "1")
    return lane, there & enabled


def moved(waves: Waves, ins: Instruction, operand: Operand) -> Array:
    """uint32: the source as each lane sees it; 0 where it reads no lane that runs."""
    if operand.kind != "v" or operand.negate or operand.absolute:
        raise Unknown(f"{ins.text}: DPP of this source")
    lane, valid = _valid(waves, ins)
    needed = np.zeros_like(valid)
    for wave in range(waves.count):
        reading = valid[wave] & waves.on[wave] & _rows(waves, ins)
        needed[wave, lane[reading]] = True
    bits = waves.vector_bits(operand.index, on=needed)[:, np.maximum(lane, 0)]
    return np.where(valid, bits, np.uint32(0))


def _rows(waves: Waves, ins: Instruction) -> Array:
    lane = np.arange(waves.lanes)
    row, bank = (int(ins.modifiers.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    return ((row >> (lane // 16)) & (bank >> (lane % 16 // 4)) & 1).astype(bool)


def written(waves: Waves, ins: Instruction) -> Array:
    """Lanes [waves, lanes] that the instruction writes: not those of a masked row or bank, nor, without BOUND_CTRL,
    those without a source."""
    _, valid = _valid(waves, ins)
    return _rows(waves, ins) & (valid | (ins.modifiers.get("bound_ctrl") in ("1", "0")))


def read_lane(waves: Waves, ins: Instruction) -> None:
    """V_READFIRSTLANE_B32: of the lowest lane in EXEC, of lane 0 where EXEC is 0. V_READLANE_B32: of any lane."""
    target, source, *which = ins.operands
    if source.kind != "v" or source.negate or source.absolute or ins.modifiers:
        raise Unknown(ins.text)
    if which:
        lane = np.broadcast_to(waves.value(which[0], "u32", scalar=True), (waves.count,)) % waves.lanes
    else:
        lane = np.argmax(waves.exec, axis=1)
    needed = np.zeros_like(waves.on)
    needed[waves.number, lane] = waves.running
    waves.put_scalar(target.index, waves.vector_bits(source.index, on=needed)[waves.number, lane])


def permute_rows(waves: Waves, ins: Instruction) -> None:
    """V_PERMLANEX16_B32: each lane reads a lane of the other row of its pair, by a nibble of the two selectors."""
    target, source, low, high = ins.operands
    given = [int(bit) for bit in re.findall(r"\d", ins.modifiers.get("op_sel", "[0,0]"))]
    if set(ins.modifiers) - {"op_sel"} or source.kind != "v":
        raise Unknown(ins.text)
    fetch_inactive, bound_ctrl = bool(given[0]), bool(given[1])
    select = [
        np.broadcast_to(waves.value(part, "u32", scalar=True), (waves.count,)).astype(np.uint64) for part in (low, high)
    ]
    nibbles = select[0] | (select[1] << np.uint64(32))
    lane = np.arange(waves.lanes)
    place = (nibbles[:, None] >> (np.uint64(4) * (lane % 16).astype(np.uint64))) & np.uint64(15)
    at = (lane // 16 ^ 1) * 16 + place.astype(np.int64)
    valid = np.take_along_axis(waves.exec, at, axis=1) | fetch_inactive
    needed = np.zeros_like(waves.on)
    for wave in range(waves.count):
        needed[wave, at[wave][valid[wave] & waves.on[wave]]] = True
    bits = np.take_along_axis(waves.vector_bits(source.index, on=needed), at, axis=1)
    waves.put_vector(target.index, np.where(valid, bits, np.uint32(0)), on=waves.on & (valid | bound_ctrl))


def permute_backwards(waves: Waves, ins: Instruction) -> None:
    """DS_BPERMUTE_B32: each lane reads the lane whose number is a quarter of its address; 0 where that does not run."""
    target, address, data = ins.operands
    offset = int(ins.modifiers.get("offset", "0"), 0)
    if set(ins.modifiers) - {"offset"}:
        raise Unknown(ins.text)
    at = ((waves.value(address, "u32").astype(np.int64) + offset) // 4) % waves.lanes
    valid = np.take_along_axis(waves.exec, at, axis=1)
    needed = np.zeros_like(waves.on)
    for wave in range(waves.count):
        needed[wave, at[wave][valid[wave] & waves.on[wave]]] = True
    bits = np.take_along_axis(waves.vector_bits(data.index, on=needed), at, axis=1)
    waves.put_vector(target.index, np.where(valid, bits, np.uint32(0)))
