"""From what the compiler made of a kernel to a row of the table.

AMD: the metadata of the code object and LLVM's remarks in its assembly
(https://llvm.org/docs/AMDGPUUsage.html#code-object-v5-metadata). NVIDIA: ptxas's report, the cubin's sections, and the
PTX for loads and stores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from core.hardware.tables.arch import ArchRow, lookup
from core.train.kernels.triton.compiled.table import KernelRow

SIMDS = 4
"""SIMDs that share local memory: of a CU (CDNA) or a WGP (RDNA, two CUs), and the parts of an SM."""
NVIDIA_WARPS, NVIDIA_BLOCKS, NVIDIA_REGISTERS = 64, 32, 65_536
"""Limits of an SM of compute capability 9.0; registers come to warps in 256s, and a block takes 1 KiB of shared memory
more than it asks for (CUDA programming guide, technical specifications; https://docs.nvidia.com/cuda/hopper-tuning-guide/)."""
MATRIX = re.compile(r"\b(?:v_s?mfma\w*|v_s?wmma\w*|v_smfmac\w*|wgmma\.mma_async|mma\.sync)\b")
FMA = re.compile(
    r"\b(?:v_(?:pk_|dual_)?(?:fma|fmac|mac|mad|fmaak|fmamk|madak|madmk)_(?:mix|mixlo_|mixhi_|legacy_)?f\d+\w*|fma\.rn[.\w]*)"
)
AMD_MEMORY = re.compile(r"^\s*(?:global|buffer|flat)_(load|store)_(\w+)", re.MULTILINE)
PTX_MEMORY = re.compile(r"\b(ld|st)\.(?:\w+\.)*?global([.\w:]*)")
PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^,]*,[^,]*,\s*(0x[0-9a-f]+|\d+)")


def amd(kernel: str, case: str, target: str, assembly: str, shared: int, warps: int) -> KernelRow:
    """A row from the assembly of one kernel. `shared`: local memory as Triton's metadata has it (the code object's own
    field does not count what a launch adds)."""
    occupancy = _number(r"^; Occupancy: (\d+)", assembly)
    vgprs = _number(r"\.vgpr_count:\s+(\d+)", assembly)
    arch = _arch(target)
    pool = arch.lds_kib * (1 if arch.wave_size == 64 else 2) * 1024  # a WGP has two CUs' memory
    groups = min(occupancy * SIMDS // warps, pool // shared if shared else occupancy * SIMDS)
    return KernelRow(
        kernel, case, target, warps, vgprs,
        sgprs=_number(r"\.sgpr_count:\s+(\d+)", assembly),
        spills=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly) + _number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
        scratch=_number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        lds=shared,
        waves=_waves(groups, warps),
        loads=_widths(_amd_bits(name) for kind, name in AMD_MEMORY.findall(assembly) if kind == "load"),
        stores=_widths(_amd_bits(name) for kind, name in AMD_MEMORY.findall(assembly) if kind == "store"),
        matrix=len(MATRIX.findall(assembly)),
        fma=len(FMA.findall(assembly)),
        code=_number(r"^; codeLenInByte = (\d+)", assembly),
    )  # fmt: skip


def nvidia(
    kernel: str, case: str, target: str, ptx: str, cubin: bytes, report: str, symbol: str, shared: int, warps: int
) -> KernelRow:
    """A row from a kernel's PTX, its object and the report of `ptxas -v`."""
    registers = _number(r"Used (\d+) registers", report)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = NVIDIA_REGISTERS // per_warp // SIMDS * SIMDS
    pool = (_arch(target).lds_kib + 1) * 1024
    groups = min(min(by_registers, NVIDIA_WARPS) // warps, NVIDIA_BLOCKS, pool // (shared + 1024))
    copies = [8 * int(size, 0) for size in PTX_COPY.findall(ptx)]
    return KernelRow(
        kernel, case, target, warps, registers,
        sgprs=0,
        spills=_number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
        scratch=_number(r"(\d+) bytes stack frame", report),
        lds=shared,
        waves=_waves(groups, warps),
        loads=_widths([*copies, *(_ptx_bits(rest) for kind, rest in PTX_MEMORY.findall(ptx) if kind == "ld")]),
        stores=_widths(_ptx_bits(rest) for kind, rest in PTX_MEMORY.findall(ptx) if kind == "st"),
        matrix=len(MATRIX.findall(ptx)),
        fma=len(FMA.findall(ptx)),
        code=_section_size(cubin, f".text.{symbol}"),
    )  # fmt: skip


def _arch(target: str) -> ArchRow:
    row = lookup(target)
    if row is None:
        raise ValueError(f"{target} is not in core/hardware/tables/arch.py")
    return row


def _waves(groups: int, warps: int) -> int:
    return groups * warps // SIMDS if groups * warps >= SIMDS else int(groups > 0)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return int(found[1])


def _widths(bits: Iterable[int]) -> str:
    return " ".join(f"{width}×{count}" for width, count in sorted(Counter(bits).items(), reverse=True))


def _amd_bits(name: str) -> int:
    """Width in bits of `load_…` or `store_…`: dwordx4, b128 → 128; ushort, d16_b16, short_d16_hi → 16."""
    name = name.removeprefix("lds_").removeprefix("d16_hi_").removeprefix("d16_")
    name = name.removesuffix("_d16_hi").removesuffix("_d16")
    words = {"dword": 32, "ushort": 16, "sshort": 16, "short": 16, "ubyte": 8, "sbyte": 8, "byte": 8}
    if name in words:
        return words[name]
    if sized := re.fullmatch(r"dwordx(\d)|[bui](\d+)", name):
        return 32 * int(sized[1]) if sized[1] else int(sized[2])
    raise ValueError(f"a load or store of unknown width: {name}")


def _ptx_bits(rest: str) -> int:
    """Width in bits of `.v4.b32`, `.L1::evict_last.b16`, …"""
    sized = re.fullmatch(r"(?:.*?\.v(\d))?.*?\.[bufs]f?(\d+)", rest)
    if sized is None:
        raise ValueError(f"a load or store of unknown width: {rest}")
    return int(sized[1] or 1) * int(sized[2])


def _section_size(elf: bytes, name: str) -> int:
    """Size of a section of a 64-bit little-endian object, bytes."""
    at = int.from_bytes(elf[0x28:0x30], "little")
    size, count, names = (int.from_bytes(elf[i : i + 2], "little") for i in (0x3A, 0x3C, 0x3E))
    sections = [elf[at + i * size : at + (i + 1) * size] for i in range(count)]

    def field(section: bytes, place: int, width: int) -> int:
        return int.from_bytes(section[place : place + width], "little")

    strings = field(sections[names], 0x18, 8)
    for section in sections:
        start = strings + field(section, 0, 4)
        if elf[start : elf.index(b"\0", start)].decode() == name:
            return field(section, 0x20, 8)
    raise ValueError(f"the object has no section {name}")


def row(form: Any, compiled: Any, report: str) -> KernelRow:
    """The row of one compiled form (`record.Form`, Triton's `CompiledKernel`)."""
    about = compiled.metadata
    named = (form.kernel, form.case, form.target)
    if "amdgcn" in compiled.asm:
        return amd(*named, compiled.asm["amdgcn"], about.shared, about.num_warps)
    return nvidia(*named, compiled.asm["ptx"], compiled.asm["cubin"], report, about.name, about.shared, about.num_warps)
