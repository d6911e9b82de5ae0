"""The committed table of compiled kernels: rows, limits, differences, and the page made from it. No Triton is needed.

One line of table.csv is one kernel of one case on one target, so that a change of a kernel shows in review as changed
lines.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from core.hardware.tables.arch import lookup

TRITON = "3.9.0"
"""The compiler that the table is of (locks/aot.in): another one allots registers otherwise."""
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "sm_90")
EXECUTED = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
"""Targets whose code tests execute, instruction by instruction (tests/kernels/test_machine_kernels.py)."""
PATH = Path(__file__).with_name("table.csv")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What the code object of a kernel says of itself."""

    kernel: str
    case: str
    target: str
    warps: int
    """Waves of a workgroup (warps of a block)"""
    vgprs: int
    """Vector registers of a lane, accumulation registers among them; registers of a thread on NVIDIA"""
    sgprs: int
    """Scalar registers of a wave; 0 on NVIDIA, which counts none"""
    spills: int
    """Registers spilled (NVIDIA: bytes of spill stores and loads)"""
    scratch: int
    """Bytes of private memory of a lane (NVIDIA: of its stack frame)"""
    lds: int
    """Bytes of local (shared) memory of a workgroup"""
    waves: int
    """Waves that fit on one SIMD (warps on one of the four parts of an SM), by registers, local memory and whole
    workgroups"""
    loads: str
    """Global load instructions as bits of a lane × how many of them are in the code"""
    stores: str
    matrix: int
    """Matrix instructions (MFMA, WMMA, MMA)"""
    fma: int
    """Fused multiply-adds"""
    code: int
    """Bytes of instructions"""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kernel, self.case, self.target


def read(path: Path = PATH) -> list[KernelRow]:
    """The rows of the table; none where there is no table."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> KernelRow:
    values: list[Any] = [
        int(line[field.name]) if field.type == "int" else line[field.name] for field in fields(KernelRow)
    ]
    return KernelRow(*values)


def write(rows: Iterable[KernelRow], path: Path = PATH) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(KernelRow))
        writer.writerows(astuple(row) for row in rows)


def faults(row: KernelRow) -> list[str]:
    """What must not be in any row, in words."""
    arch = lookup(row.target)
    if arch is None:
        raise ValueError(f"{row.target} is not in core/hardware/tables/arch.py")
    where = f"{row.kernel} ({row.case}) on {row.target}"
    found = []
    if row.spills:
        found.append(f"{where} spills {row.spills} {'bytes' if arch.vendor == 'nvidia' else 'registers'}")
    if row.scratch:
        found.append(f"{where} needs {row.scratch} bytes of scratch memory a lane")
    if row.lds > arch.lds_kib * 1024:
        found.append(f"{where} needs {row.lds} bytes of local memory, more than the {arch.lds_kib} KiB there are")
    if not row.waves:
        found.append(f"{where} does not fit: not one workgroup of {row.warps} waves")
    return found


def differences(old: Iterable[KernelRow], new: Iterable[KernelRow]) -> list[str]:
    """Line by line, what of the table is no longer so."""
    before, after = {row.key: row for row in old}, {row.key: row for row in new}
    found = []
    for key in [*after, *(key for key in before if key not in after)]:
        where = f"{key[0]} ({key[1]}) on {key[2]}"
        if key not in before:
            found.append(f"{where}: not in the table")
        elif key not in after:
            found.append(f"{where}: in the table, but no longer compiled")
        else:
            changes = [
                f"{field.name} {getattr(before[key], field.name)} → {getattr(after[key], field.name)}"
                for field in fields(KernelRow)
                if getattr(before[key], field.name) != getattr(after[key], field.name)
            ]
            if changes:
                found.append(f"{where}: {', '.join(changes)}")
    return found


# --- docs/kernel-table.md --------------------------------------------------------------------------


COLUMNS = (
    "target", "code", "warps", "registers", "scalar", "local", "waves", "loads", "stores", "matrix", "fma", "bytes",
)  # fmt: skip


def render() -> str:
    rows = read()
    lines = [
        "# Compiled kernels",
        "",
        "Generated from `core/train/kernels/triton/compiled/table.csv` by `make docs`; how it is made and read is in",
        f"[kernels.md](kernels.md#compiled-without-a-card). Compiler: Triton {TRITON}. No kernel spills or uses",
        "scratch memory: the check fails otherwise, so these columns are left out here.",
        "",
        "Registers are of a lane, local memory is bytes of a workgroup, waves are those that fit on one SIMD (one of",
        "the four parts of an SM), loads and stores are bits of a lane × instructions, bytes are those of the code.",
        "",
        "Code that is *executed* is run by the tests in an emulator and computes the right numbers",
        "([kernels.md](kernels.md#executed-without-a-card)). The rest is only *compiled*.",
    ]
    for kernel in dict.fromkeys(row.kernel for row in rows):
        lines += ["", f"## {kernel}"]
        for case in dict.fromkeys(row.case for row in rows if row.kernel == kernel):
            lines += [
                "",
                f"### {case}",
                "",
                f"| {' | '.join(COLUMNS)} |",
                f"|{'---|' * len(COLUMNS)}",
                *(_line(row) for row in rows if (row.kernel, row.case) == (kernel, case)),
            ]
    return "\n".join(lines) + "\n"


def _line(row: KernelRow) -> str:
    cells = (
        f"`{row.target}`", "executed" if row.target in EXECUTED else "compiled", row.warps, row.vgprs,
        row.sgprs or "", row.lds, row.waves, row.loads, row.stores, row.matrix or "", row.fma or "", f"{row.code:,}",
    )  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |"
