"""A launch: registers as the hardware sets them up, and waves run until all have ended.

Waves run together as long as they are at the same instruction. Where a branch parts them, those at the lowest
instruction run first, and they join again where they meet. The initial registers are LLVM's "AMDGPU Usage", Initial
Kernel Execution State.
"""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np

from tests.support.machine import cross, scalar, transfers, vector
from tests.support.machine.assembly import EXEC, IGNORED, TTMP, VCC, Fault, Instruction, Program, Unknown
from tests.support.machine.memory import Local, Memory
from tests.support.machine.waves import Array, Waves

AT_ONCE = 64
"""Waves that run side by side; more of them run one batch after another."""
LONGEST = 2_000_000
"""Instructions after which a launch is taken to hang."""
USER = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip
"""User scalar registers in their order, and how many each takes."""


def launch(
    program: Program,
    memory: Memory,
    arguments: bytes,
    threads: int,
    local: int,
    programs: list[int],
    preload: bool = True,
) -> Counter[str]:
    """Run these workgroups of a one-dimensional grid, and count the instructions executed by name.

    arguments: the kernel-argument segment; local: bytes of local memory of a workgroup; preload: enter where the
    hardware has loaded the first arguments into registers, if the kernel offers that, rather than where the code does.
    """
    assert len(arguments) == program.number("kernarg_size"), "the arguments are not those of this kernel"
    segment = memory.add("the kernel's arguments", np.frombuffer(arguments, np.uint8).copy(), alignment=64)
    per_group, counted = threads // program.lanes, Counter[str]()
    batch = max(1, AT_ONCE // per_group)
    for first in range(0, len(programs), batch):
        some = programs[first : first + batch]
        waves = Waves(
            len(some) * per_group, program.lanes, program.number("next_free_vgpr"),
            np.repeat(np.arange(len(some)), per_group), memory, Local(len(some), local, len(some) * per_group),
        )  # fmt: skip
        entry = _set_up(program, waves, segment, arguments, np.repeat(np.array(some), per_group), per_group, preload)
        with np.errstate(all="ignore"):
            counted += _Run(program, waves, per_group).go(entry)
    return counted


def _set_up(
    program: Program, waves: Waves, segment: int, arguments: bytes, group: Array, per_group: int, preload: bool
) -> int:
    """Registers at the start. Where the waves start."""
    within = np.arange(waves.count) % per_group
    waves.put_vector(0, (within[:, None] * waves.lanes + np.arange(waves.lanes)).astype(np.uint32))
    place = 0
    for name, size in USER:
        if program.number(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                waves.put_scalar(place, np.array(segment, np.uint64), 2)
            elif name != "private_segment_buffer":
                raise Unknown(f"a kernel that starts with {name} in registers")
            place += size
    entry, words = 0, program.number("user_sgpr_kernarg_preload_length")
    if words:
        entry = _after_preload(program) if preload else 0
        for at in range(words if preload else 0):
            (word,) = struct.unpack_from("<I", arguments, 4 * at)
            waves.put_scalar(place + at, np.array(word, np.uint32))
        place += words
    if place > program.number("user_sgpr_count"):
        raise Unknown("more registers are set up than the kernel has asked for")
    if program.target.startswith("gfx12"):
        waves.put_scalar(TTMP + 9, group.astype(np.uint32))
        waves.put_scalar(TTMP + 7, np.zeros(1, np.uint32))
        waves.put_scalar(TTMP + 8, (within << 25).astype(np.uint32))
    else:
        waves.put_scalar(program.number("user_sgpr_count"), group.astype(np.uint32))
    return entry


def _after_preload(program: Program) -> int:
    """A kernel whose arguments are loaded by the hardware begins with the loads for hardware that does not, 256 bytes
    that end in a branch to the code itself."""
    for at, instruction in enumerate(program.instructions):
        if instruction.name == "s_branch":
            assert program.labels[instruction.operands[0].text] == at + 1
            return at + 1
        assert instruction.name.startswith(("s_load", "s_waitcnt")), instruction.text
    raise Unknown("a kernel without a place to start at")


class _Run:
    def __init__(self, program: Program, waves: Waves, per_group: int) -> None:
        self.program, self.waves, self.per_group = program, waves, per_group
        self.at = 0
        self.running = np.ones(waves.count, bool)
        self.parted: dict[int, Array] = {}
        """Waves that wait at other instructions."""
        self.blocked: dict[int, Array] = {}
        """Waves that have reached a barrier, by the instruction after it."""
        self.signalled = np.zeros(waves.count, np.int64)
        self.ended = np.zeros(waves.count, bool)
        self.counted: Counter[str] = Counter()

    def go(self, entry: int) -> Counter[str]:
        self.at = entry
        executed = 0
        while self.running is not None:
            if self.at in self.parted:
                self._switch(self.running | self.parted.pop(self.at), self.at)
            instruction = self.program.instructions[self.at]
            try:
                self._step(instruction)
            except (Fault, Unknown) as error:
                where = f"line {instruction.line}, {instruction.text}"
                raise type(error)(f"{self.program.name} on {self.program.target}, {where}: {error}") from error
            self.counted[instruction.name] += 1
            if instruction.other is not None:
                self.counted[instruction.other.name] += 1
            executed += 1
            if executed > LONGEST:
                raise Fault(f"{self.program.name} has not ended after {LONGEST} instructions")
        return self.counted

    def _step(self, ins: Instruction) -> None:
        name = ins.name
        if name == "s_endpgm":
            self.ended |= self.running
            self._leave()
        elif name == "s_barrier":
            self.signalled += self.running
            self._wait()
        elif name == "s_barrier_signal":
            self.signalled += self.running
            self.at += 1
        elif name == "s_barrier_wait":
            self._wait()
        elif name.startswith(("s_cbranch_", "s_branch")):
            self._branch(ins, self._taken(name))
        else:
            self._compute(ins)
            self.at += 1

    def _compute(self, ins: Instruction) -> None:
        if ins.name.startswith(IGNORED):
            return
        if ins.name in ("v_readfirstlane_b32", "v_readlane_b32"):
            cross.read_lane(self.waves, ins)
        elif ins.name == "v_permlanex16_b32":
            cross.permute_rows(self.waves, ins)
        elif not any(kind.execute(self.waves, ins) for kind in (vector, scalar, transfers)):
            raise Unknown("the machine does not know this instruction")

    # --- control -----------------------------------------------------------------------------------

    def _switch(self, running: Array, at: int) -> None:
        self.running, self.at = running, at
        self.waves.run(running)

    def _leave(self) -> None:
        """The running waves have ended or wait; others go on."""
        if not self.parted:
            self._release()
        if self.parted:
            at = min(self.parted)
            self._switch(self.parted.pop(at), at)
        elif self.ended.all():
            self.running = None  # type: ignore[assignment]
        else:
            raise Fault("waits at a barrier that not every wave of its workgroup reaches")

    def _wait(self) -> None:
        if ((self.signalled <= self.waves.epoch) & self.running).any():
            raise Fault("waits at a barrier that it has not signalled")
        after = self.at + 1
        self.blocked[after] = self.blocked.get(after, np.zeros(self.waves.count, bool)) | self.running
        self._leave()

    def _release(self) -> None:
        """Let go the workgroups whose waves have all signalled."""
        arrived = (self.signalled > self.waves.epoch) | self.ended
        complete = np.repeat(arrived.reshape(-1, self.per_group).all(axis=1), self.per_group)
        for at, waiting in list(self.blocked.items()):
            free = waiting & complete
            if free.any():
                self.waves.epoch[free] += 1
                self.parted[at] = self.parted.get(at, np.zeros(self.waves.count, bool)) | free
                self.blocked[at] = waiting & ~free
                if not self.blocked[at].any():
                    del self.blocked[at]

    def _taken(self, name: str) -> Array:
        waves = self.waves
        if name == "s_branch":
            return np.ones(waves.count, bool)
        what = name.removeprefix("s_cbranch_")
        if what in ("scc0", "scc1"):
            return waves.get_scc() == (what == "scc1")
        if what in ("execz", "execnz", "vccz", "vccnz"):
            count = waves.lanes // 32
            bits = waves.scalar_bits(EXEC if what.startswith("exec") else VCC, count)
            return (bits == 0) == (not what.endswith("nz"))
        raise Unknown("the machine does not know this branch")

    def _branch(self, ins: Instruction, taken: Array) -> None:
        label = ins.operands[0].text
        if label not in self.program.labels:
            raise Unknown(f"no label {label}")
        target, on = self.program.labels[label], self.at + 1
        go, stay = taken & self.running, ~taken & self.running
        if not stay.any():
            self.at = target
        elif not go.any():
            self.at = on
        else:
            for at, which in ((target, go), (on, stay)):
                self.parted[at] = self.parted.get(at, np.zeros(self.waves.count, bool)) | which
            self._leave()
            return
        if self.parted and min(self.parted) < self.at:
            self.parted[self.at] = self.parted.get(self.at, np.zeros(self.waves.count, bool)) | self.running
            self._leave()
