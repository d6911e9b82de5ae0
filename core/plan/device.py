"""The device that a job is planned for. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.hardware.precision import choose_precision
from core.hardware.selftest import Dtype
from core.hardware.tables.arch import lookup
from core.plan.constants import MIB, Kind
from core.spec.axes.training import Training

CONTEXT_BYTES = 512 * MIB
"""Memory of a GPU that the driver takes for a process before its first tensor: kernels, streams, the libraries' handles
(about 300 MiB to 500 MiB with CUDA 12 and ROCm 6). A process that asks the driver how much is free has paid it
already."""
SLACK_BYTES = {"cpu": 24 * MIB, "gpu": 64 * MIB}
"""Memory that no other term accounts for. CPU: packing buffers and reordered operands of the matrix libraries, and
pages that malloc keeps. GPU: the workspaces of the matrix libraries (cuBLAS 8 MiB to 32 MiB, hipBLASLt 32 MiB) and
blocks of the allocator that are not full (2 MiB each)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One slot: a GPU, or a node's CPU."""

    kind: Kind
    arch: str = "cpu"
    """`gfx942`, `sm_90`, `cpu`."""
    vendor: str = "any"
    memory: int | None = None
    """Bytes of the device that a job may take now, or has in all; None where unknown. On a CPU, of the host."""
    host: int | None = None
    """Bytes of the host's memory."""
    bf16: bool = True
    """Instructions for bfloat16."""
    context: bool = False
    """The driver's memory (CONTEXT_BYTES) still has to come out of `memory`."""
    products: Dtype | None = None
    """Dtype of products where it is decided already, by the self-test, say. None: as the architecture has it."""
    parts: bool | None = None
    """Whether norms and gated activations are one operator each (core/train/kernels/fused), where that is known
    already, by the self-test, say. None: on GPUs with matrix instructions, for which Triton compiles."""

    @property
    def one_memory(self) -> bool:
        """The device is the host's processor: what is offloaded stays in the same memory."""
        return self.kind == "cpu"

    @property
    def usable(self) -> int | None:
        """`memory` without what the driver is going to take."""
        if self.memory is None or self.kind == "cpu" or not self.context:
            return self.memory
        return max(0, self.memory - CONTEXT_BYTES)

    def precision(self, training: Training) -> Dtype:
        """The dtype of matrix products. `fp8` counts as bf16: what is kept is as wide."""
        if self.products is not None:
            return self.products
        wanted = "bf16" if training.precision == "fp8" else training.precision
        return choose_precision(wanted, self.arch, fast_bf16=self.bf16)[0]

    def fuses_parts(self, training: Training) -> bool:
        """Whether norms and gated activations keep no more than they are given. Not counted for a CPU, where the plan
        would be further below what processes took (bench/results/plan-cpu-2026-11-25.txt)."""
        if training.compile:
            return False
        if self.parts is not None:
            return self.parts
        row = lookup(self.arch)
        return self.kind == "gpu" and row is not None and row.matrix != "none"

    def attention(self, training: Training) -> Literal["flash", "math", "eager"]:
        """Which memory attention takes: `flash` (and `efficient`) never hold the scores of a whole row."""
        match training.attention:
            case "eager":
                return "eager"
            case "math":
                return "math"
            case "auto" | "flash" | "cudnn" | "efficient":
                row = lookup(self.arch)
                best = "math" if row is None else row.attention
                return "math" if best == "math" else "flash"
