"""In which precision a run computes: what was asked for, what the architecture has, what the self-test let pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, assert_never

from core.errors import SpecError
from core.hardware.selftest import DTYPES, Dtype
from core.hardware.tables import arch as table

Wanted = Literal["auto", "bf16", "fp16", "fp32"]
TF32 = frozenset({"gfx942", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"})
"""Matrix instructions that take float32 operands with 10 bits of mantissa: NVIDIA's from Ampere on (CUDA programming
guide, arithmetic of compute capability 8.0), AMD's XF32 of CDNA 3 alone (ISA guide, v_mfma_*_xf32; gone in CDNA 4)."""


def choose_precision(
    wanted: Wanted, arch: str, *, fast_bf16: bool, usable: Collection[str] = DTYPES
) -> tuple[Dtype, str | None]:
    """(precision, why it is not what was asked for).

    `fast_bf16`: whether the device has instructions for it (of a CPU only the processor knows it). `usable`: what
    passed the self-test. bf16 falls back to fp16, which needs a loss scaler, and that to float32; on a CPU at once to
    float32, since fp16 is no faster there. SpecError when not even that is left, or float32 was asked for and is wrong.
    """
    row = table.lookup(arch)
    cpu = row is not None and row.vendor == "cpu"
    if wanted == "fp32":
        if "fp32" not in usable:
            raise SpecError(
                f"float32 products are wrong on this device ({arch}), as its self-test found; take `precision: auto`",
                field="training.precision",
            )
        return "fp32", None
    reasons: list[str] = []
    for candidate in _order(wanted):
        reason = _against(candidate, wanted, arch, cpu, fast_bf16, usable)
        if reason is None:
            return candidate, f"{', '.join(reasons)}: computing in {candidate}" if reasons else None
        reasons.append(reason)
    raise SpecError(f"nothing computes correctly on this device: {', '.join(reasons)}", field="training.precision")


def against_fp8(arch: str, *, installed: bool, found: str | None) -> str | None:
    """What speaks against products in 8-bit floats; None: they are computed so. `found`: what the self-test says."""
    row = table.lookup(arch)
    if row is None or (row.fp8 == "none" and row.vendor != "cpu"):
        return f"{arch} has no 8-bit floats"
    if not installed:
        return "torchao is not installed on this node (pip install torchao)"
    return found


def _order(wanted: Literal["auto", "bf16", "fp16"]) -> tuple[Dtype, ...]:
    match wanted:
        case "auto" | "bf16":
            return ("bf16", "fp16", "fp32")
        case "fp16":
            return ("fp16", "fp32")
        case _ as never:
            assert_never(never)


def _against(
    candidate: Dtype, wanted: Wanted, arch: str, cpu: bool, fast_bf16: bool, usable: Collection[str]
) -> str | None:
    """What speaks against it; None: it is taken."""
    if candidate not in usable:
        return f"{candidate} failed this device's self-test"
    if candidate == "bf16" and not fast_bf16 and not (cpu and wanted == "bf16"):
        return "this CPU has no bf16 instructions" if cpu else f"{arch} has no bf16"
    if candidate == "fp16" and wanted != "fp16" and (cpu or table.precision(arch) == "fp32"):
        return "fp16 is no faster on a CPU" if cpu else f"nothing is known of {arch}"
    return None
