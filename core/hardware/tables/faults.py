"""Known faults of GPU stacks, and the way around each, as data.

A row says where a fault was seen, who says so, and what we do about it: set a variable for the trainer before torch is
imported, drop an option from one, or keep products within limits (core/train/model/gemm_limits.py reads them). Nothing
is done silently: a variable that the operator has set stays as it is, and every change is reported in the
worker's log and in the run record of each job.

Versions are not part of a row while no fixed release is known: the fault may be gone on your box, and a variable set in
the worker's own environment (`TORCH_BLAS_PREFER_HIPBLASLT=1`) says that you know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.hardware.tables.arch import ROWS, lookup

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Limits:
    """How large, and how narrow, a matrix product may be."""

    fp32_rows: int | None = None
    """Rows of a float32 product."""
    output_bytes: int | None = None
    """Bytes of a product's output."""
    rank_multiple: int = 1
    """LoRA's narrow operands are padded with zeros to a multiple of this: same result, other shapes."""

    def tighter(self, other: Limits) -> Limits:
        """What satisfies both."""
        return Limits(
            _least(self.fp32_rows, other.fp32_rows),
            _least(self.output_bytes, other.output_bytes),
            math.lcm(self.rank_multiple, other.rank_multiple),
        )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class KnownFault:
    """One row: what goes wrong where, who says so, the way around it."""

    key: str
    arches: tuple[str, ...]
    """Names as in arch.py; `amd` stands for every AMD architecture."""
    what: str
    kind: Literal["wrong numbers", "crash", "hang", "slow"]
    sources: tuple[str, ...]
    route: str
    """What is done about it, for people."""
    set: Mapping[str, str] = field(default_factory=dict)
    """Variables of the trainer's environment, unless the operator has set them."""
    drop: tuple[str, ...] = ()
    """Options that are taken out of torch's allocator variables."""
    limits: Limits = NO_LIMITS
    """What the trainer keeps to."""
    hopeless: bool = False
    """There is no way around: such a card is left out, and trains only when somebody names it."""
    lifted_by: Mapping[str, str] = field(default_factory=dict)
    """Variables under which the fault cannot strike and `limits` does not hold."""

    def touches(self, arch: str) -> bool:
        row = lookup(arch)
        return arch.partition(":")[0] in self.arches or (
            "amd" in self.arches and row is not None and row.vendor == "amd"
        )


READ = "2026-11-21"
"""The day on which every source below was last read."""

NO_HIPBLASLT = {"TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0", "DISABLE_ADDMM_CUDA_LT": "1"}
"""torch's own choice, rocBLAS handing on to it, and addmm with a bias: three ways into the same library."""

FAULTS = (
    KnownFault(
        "hipblaslt-narrow-operand",
        ("gfx1200", "gfx1201"),
        "a matrix product with a narrow operand, such as LoRA's at rank 16, reads past its end and page-faults after "
        "minutes of training (ROCm 7.2 and later)",
        "crash",
        (
            "https://github.com/ROCm/rocm-libraries/issues/7992",
            "https://github.com/ROCm/rocm-libraries/issues/11714",
        ),
        "hipBLASLt is not used: rocBLAS does the products; where you keep it, LoRA's rank is padded to the 64 columns "
        "of the tile that reads too far",
        set=NO_HIPBLASLT,
        limits=Limits(rank_multiple=64),
        lifted_by=NO_HIPBLASLT,
    ),
    KnownFault(
        "hipblaslt-wide-output",
        ("gfx1151",),
        "a product with a large output and a small inner size (3,072 columns, inner 512 or less) ends in an illegal "
        "memory access",
        "crash",
        ("https://github.com/npatsakula/svod/issues/108",),
        "hipBLASLt is not used: rocBLAS does the products",
        set=NO_HIPBLASLT,
    ),
    KnownFault(
        "gemm-rows-2-19",
        ("gfx1201",),
        "fp32 products of more than 524,288 rows are silently wrong; bf16 and fp16 are right",
        "wrong numbers",
        ("https://github.com/ROCm/legacy-rocm-build/issues/6595",),
        "bf16 is the default there, and fp32 products of more rows are made in parts",
        limits=Limits(fp32_rows=1 << 19),
    ),
    KnownFault(
        "sgemm-gfx1151",
        ("gfx1151",),
        "rocBLAS 7.1.0 of a distribution's packages computes fp32 products wrongly",
        "wrong numbers",
        ("https://github.com/ROCm/rocBLAS/issues/1680",),
        "bf16 is the default there; use a torch that brings its own rocBLAS",
    ),
    KnownFault(
        "stores-past-2-gib",
        ("gfx950",),
        "hipBLASLt drops stores beyond 2 GiB of a 16-bit output whose rows are not a multiple of 256",
        "wrong numbers",
        ("https://github.com/ROCm/hipBLASLt/issues/2299",),
        "logits are made in chunks below that, and products that would be larger in parts",
        limits=Limits(output_bytes=1 << 31),
        lifted_by=NO_HIPBLASLT,
    ),
    KnownFault(
        "stores-past-4-gib",
        ("gfx942", "gfx950"),
        "hipBLASLt's offsets into an output wrap at 4 GiB: stores land elsewhere or nowhere, and it reports success",
        "wrong numbers",
        ("https://github.com/ROCm/rocm-libraries/pull/8767",),
        "logits are made in chunks below that, and products that would be larger in parts",
        limits=Limits(output_bytes=1 << 32),
        lifted_by=NO_HIPBLASLT,
    ),
    KnownFault(
        "tf32-drops-alpha",
        ("gfx950",),
        "hipBLASLt's fp32 products computed in TF32 drop alpha when they add to what is there",
        "wrong numbers",
        ("https://github.com/ROCm/rocm-libraries/issues/12226",),
        "TF32 stays off there",
    ),
    KnownFault(
        "gradients-gfx1033",
        ("gfx1033",),
        "gradients are wrong while forward results are right, in three builds of PyTorch",
        "wrong numbers",
        ("https://github.com/unslothai/unsloth/pull/8412",),
        "none: left out unless --gpus names it",
        hopeless=True,
    ),
    KnownFault(
        "attention-opt-in",
        (*(row.arch for row in ROWS if row.attention == "opt_in"), "gfx1100", "gfx1151", "gfx1201"),
        "PyTorch has fast attention kernels there and does not take them by itself, or did not until lately: attention "
        "then makes the whole matrix of scores",
        "slow",
        (
            "https://github.com/unslothai/unsloth/pull/8821",
            "https://github.com/ROCm/pytorch/pull/3313",
        ),
        "they are switched on, and used if the self-test finds them right",
        set={"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"},
    ),
    KnownFault(
        "bitsandbytes-fused-4-bit",
        ("gfx1100",),
        "bitsandbytes' fused 4-bit product is wrong while its dequantisation is right",
        "wrong numbers",
        ("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2087",),
        "4-bit weights are dequantised by our own kernels; bitsandbytes is never used",
    ),
    KnownFault(
        "expandable-segments",
        ("amd",),
        "torch's allocator with expandable_segments:True hangs in the driver, beyond what Ctrl-C can stop",
        "hang",
        (
            "https://github.com/pytorch/pytorch/issues/192259",
            "https://github.com/pytorch/pytorch/issues/187343",
        ),
        "the option is taken out of the trainer's allocator settings",
        drop=("expandable_segments",),
    ),
)


def known(arch: str) -> tuple[KnownFault, ...]:
    """The rows that touch `arch` (`gfx1201`, with or without feature suffixes; `sm_90`; `cpu`)."""
    return tuple(fault for fault in FAULTS if fault.touches(arch))


def limits(arch: str, environment: Mapping[str, str]) -> Limits:
    """What products on `arch` must keep to in a process with this environment."""
    result = NO_LIMITS
    for fault in known(arch):
        lifted = fault.lifted_by and all(environment.get(name) == value for name, value in fault.lifted_by.items())
        if not lifted:
            result = result.tighter(fault.limits)
    return result


@dataclass(frozen=True, slots=True)
class Change:
    """One variable of a trainer's environment that a known fault is about."""

    variable: str
    value: str
    """What the trainer has; empty: it was taken away whole."""
    ours: bool
    """False: the operator has set it, against the way around, and it stays."""
    fault: str
    """Key of the row."""
    what: str

    @property
    def words(self) -> str:
        if not self.ours:
            return f"{self.variable}={self.value} is yours and stays, against {self.fault}: {self.what}"
        if self.variable in ALLOCATOR_VARIABLES:
            return f"{self.variable}={self.value}, shortened ({self.fault}: {self.what})"
        return f"{self.variable}={self.value} ({self.fault}: {self.what})"


@dataclass(frozen=True, slots=True)
class Routed:
    """A trainer's environment with every way around applied, and what that meant."""

    environment: dict[str, str]
    changes: tuple[Change, ...]


def route(environment: Mapping[str, str], arch: str) -> Routed:
    """For a child on `arch`. A variable that two faults ask for is reported once, with the first of them."""
    result, changes = dict(environment), list[Change]()
    for fault in known(arch):
        for name, value in fault.set.items():
            if name not in environment:
                if name not in result:
                    changes.append(Change(name, value, True, fault.key, fault.what))
                result[name] = value
            elif environment[name] != value:
                changes.append(Change(name, environment[name], False, fault.key, fault.what))
        for option in fault.drop:
            for name in ALLOCATOR_VARIABLES:
                kept = ",".join(
                    part for part in result.get(name, "").split(",") if part.split(":")[0].strip() != option
                )
                if kept != result.get(name, ""):
                    changes.append(Change(name, kept, True, fault.key, fault.what))
                    result[name] = kept
                    if not kept:
                        del result[name]
    return Routed(result, tuple(changes))
