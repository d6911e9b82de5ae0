"""AMD GPU assembly as LLVM prints it (`asm["amdgcn"]` of a compiled Triton kernel), read into instructions.

Only the syntax is here: operands, modifiers, labels, and what the kernel descriptor says of the registers that a wave
starts with. The syntax is LLVM's AMDGPU operand and modifier syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class Unknown(Exception):
    """An instruction, modifier or operand that the machine does not have. The message names it."""


class Fault(Exception):
    """The program did what no correct program does: it left its memory, or used a value that nothing had written."""


VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126
"""Places of the special scalar registers among the scalar registers."""

IGNORED = (
    "s_nop", "s_waitcnt", "s_wait_", "s_delay_alu", "s_clause", "s_sendmsg", "buffer_gl0_inv", "global_inv",
    "buffer_inv", "s_set_gpr_idx_off", "s_code_end", "s_sleep", "s_setprio", "s_icache_inv",
    "s_set_inst_prefetch_distance",
)  # fmt: skip
"""Waits, hints and cache controls. The machine finishes an instruction before the next one, and has no caches."""


@dataclass(frozen=True, slots=True)
class Operand:
    text: str
    kind: str
    """v, s or literal."""
    index: int = 0
    count: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    half: str = ""
    """l or h: one half of a vector register, as gfx11 and later name it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    text: str
    line: int
    name: str
    """Without its encoding's suffix (_e32, _e64, _dpp, _sdwa)."""
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    other: Instruction | None = None
    """The second half of a dual-issue pair."""


@dataclass(slots=True)
class Program:
    name: str
    target: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    descriptor: dict[str, str] = field(default_factory=dict)
    """The `.amdhsa_` directives without that prefix."""
    arguments: list[tuple[int, int, str]] = field(default_factory=list)
    """Offset, size in bytes and kind (global_buffer, by_value) of each kernel argument."""

    @property
    def lanes(self) -> int:
        return 64 if self.target.startswith("gfx9") else 32

    def number(self, directive: str) -> int:
        return int(self.descriptor.get(directive, "0"))


def read(text: str) -> Program:
    """The program in the text of one kernel."""
    target = re.search(r'\.amdgcn_target "[^"]*-(gfx\w+)', text)
    name = re.search(r"\.amdhsa_kernel (\w+)", text)
    if target is None or name is None:
        raise Unknown("this is not the assembly of one AMD kernel")
    program = Program(name[1], target[1])
    code, _, rest = text.partition(".section\t.rodata")
    if not rest:
        raise Unknown("the assembly has no kernel descriptor")
    for number, whole in enumerate(code.splitlines(), 1):
        line = whole.split(";")[0].strip()
        if label := re.fullmatch(r"([\w.$]+):", line):
            program.labels[label[1]] = len(program.instructions)
        elif line and not line.startswith("."):
            program.instructions.append(instruction(line, number))
    program.descriptor = dict(re.findall(r"\.amdhsa_(\w+) ([^\n]+)", rest))
    for block in re.findall(r"^ +- (?:\.address_space: +\w+\n +)?\.offset:(?:.*\n)+?.*\.value_kind: +\w+", rest, re.M):
        offset, size = (int(re.search(rf"\.{key}: +(\d+)", block)[1]) for key in ("offset", "size"))  # type: ignore[index]
        program.arguments.append((offset, size, re.search(r"\.value_kind: +(\w+)", block)[1]))  # type: ignore[index]
    return program


def instruction(text: str, line: int = 0) -> Instruction:
    """One instruction, or a dual-issue pair (`x :: y`)."""
    first, _, second = (part.strip() for part in text.partition("::"))
    other = instruction(second, line) if second else None
    name, _, rest = first.partition(" ")
    if name.startswith(IGNORED):
        return Instruction(text, line, name, (), {}, other)
    modifiers: dict[str, str] = {}
    operands = []
    for part in _commas(rest):
        words = part.split()
        operands.append(operand(words[0]))
        for word in words[1:]:
            key, _, value = word.partition(":")
            modifiers[key] = value
    for suffix in ("_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp"):
        name = name.removesuffix(suffix)
    name = re.sub(r"^v_dual_", "v_", name)
    return Instruction(text, line, name, tuple(operands), modifiers, other)


def _commas(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", text)]
    return [part for part in parts if part]


SPECIAL = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1), "m0": (M0, 1), "null": (NULL, 1),
}  # fmt: skip


def operand(text: str) -> Operand:
    inner, negate, absolute, sign_extend = text, False, False, False
    if wrapped := re.fullmatch(r"(neg|abs|sext)\((.*)\)", inner):
        negate, absolute, sign_extend = (wrapped[1] == word for word in ("neg", "abs", "sext"))
        inner = wrapped[2]
    if re.match(r"-[vs|]", inner):
        negate, inner = True, inner[1:]
    if bars := re.fullmatch(r"\|(.*)\|", inner):
        absolute, inner = True, bars[1]
    flags = {"negate": negate, "absolute": absolute, "sign_extend": sign_extend}
    if inner in SPECIAL:
        index, count = SPECIAL[inner]
        return Operand(text, "s", index, count, **flags)
    if found := re.fullmatch(r"(v|s|ttmp)(\d+)(?:\.([lh]))?", inner):
        base = TTMP if found[1] == "ttmp" else 0
        return Operand(text, found[1][0].replace("t", "s"), base + int(found[2]), 1, half=found[3] or "", **flags)
    if found := re.fullmatch(r"(v|s|ttmp)\[(\d+):(\d+)\]", inner):
        base, low, high = TTMP if found[1] == "ttmp" else 0, int(found[2]), int(found[3])
        return Operand(text, found[1][0].replace("t", "s"), base + low, high - low + 1, **flags)
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", inner):
        return Operand(text, "literal", value=int(inner, 0), **flags)
    if re.fullmatch(r"-?\d*\.\d+", inner):
        return Operand(text, "literal", value=float(inner), **flags)
    if re.fullmatch(r"\.?[A-Za-z][\w.$]*", inner):
        return Operand(inner, "label")
    raise Unknown(f"operand {text!r}")
