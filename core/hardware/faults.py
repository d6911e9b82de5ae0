"""Known faults of GPU stacks, and the way around each, as data.

A row says where a fault was seen, who says so, and what we do about it before torch is imported: set a variable for
the trainer, or drop an option from one. Nothing is done behind anybody's back: a variable that the operator has set
stays as it is, and every change is told in the worker's log and in the run record of each job.

Versions are not part of a row while no fixed release is known: the fault may be gone on your box, and a variable set in
the worker's own environment (`TORCH_BLAS_PREFER_HIPBLASLT=1`) says that you know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.hardware.arch import lookup

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
        "hipBLASLt is not used: rocBLAS does the products",
        set=NO_HIPBLASLT,
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
        "bf16 is the default there, and a micro-batch has fewer tokens than that",
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
        "hipBLASLt drops stores beyond 2 GiB of an output, which whole logits easily are",
        "wrong numbers",
        ("https://github.com/ROCm/hipBLASLt/issues/2299",),
        "the chunked loss never makes whole logits of that size",
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


def route(environment: Mapping[str, str], arch: str) -> tuple[dict[str, str], list[str]]:
    """(the environment with every way around applied, what was changed or left, in words) for a child on `arch`."""
    result, told = dict(environment), list[str]()
    for fault in known(arch):
        for name, value in fault.set.items():
            if name not in environment:
                if name not in result:
                    told.append(f"{name}={value} ({fault.key}: {fault.what})")
                result[name] = value
            elif environment[name] != value:
                told.append(f"{name}={environment[name]} is yours and stays, against {fault.key}: {fault.what}")
        for option in fault.drop:
            for name in ALLOCATOR_VARIABLES:
                kept = ",".join(
                    part for part in result.get(name, "").split(",") if part.split(":")[0].strip() != option
                )
                if kept != result.get(name, ""):
                    told.append(f"{name} without {option} ({fault.key}: {fault.what})")
                    result[name] = kept
                    if not kept:
                        del result[name]
    return result, told
