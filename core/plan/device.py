"""What a plan has to know of the device that a job is to run on. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.hardware.precision import choose_precision
from core.hardware.selftest import Dtype
from core.hardware.tables.arch import lookup
from core.spec.axes.training import Training

MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB
"""Of a GPU, what the driver takes for a process before its first tensor: kernels, streams, the libraries' handles
(about 300 MiB to 500 MiB with CUDA 12 and ROCm 6). Whoever asks a device what is free from within that process has paid
it already."""
SCRATCH_BYTES = {"cpu": 32 * MIB, "gpu": 512 * MIB}
"""Dense copies of packed weights (core/train/kernels/scratch.py): one weight that is larger gets room all the same."""
CHUNK_BYTES = {"cpu": 24 * MIB, "gpu": 256 * MIB}
"""Logits of one chunk of the loss, in float32 (core/train/loss/linear_cross_entropy.py)."""
SLACK_BYTES = {"cpu": 24 * MIB, "gpu": 64 * MIB}
"""What no term accounts for. CPU: packing buffers and reordered operands of the matrix libraries, and pages that malloc
keeps. GPU: the workspaces of the matrix libraries (cuBLAS 8 MiB to 32 MiB, hipBLASLt 32 MiB) and blocks of the
allocator that are not full (2 MiB each)."""

Kind = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """One slot: a GPU, or a node's CPU."""

    kind: Kind
    arch: str = "cpu"
    """`gfx942`, `sm_90`, `cpu`."""
    vendor: str = "any"
    memory: int | None = None
    """Bytes of the device that a job may take now, or has in all; None where nobody can tell. On a CPU, of the host."""
    host: int | None = None
    """Bytes of the host's memory."""
    bf16: bool = True
    """Instructions for bfloat16."""
    context: bool = False
    """The driver's own share (CONTEXT_BYTES) has still to come out of `memory`."""
    products: Dtype | None = None
    """What products are computed in, where that is settled: by the self-test, say. None: what the architecture has."""

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
        """Of matrix products (`fp8` counts as bf16: what is kept is as wide)."""
        if self.products is not None:
            return self.products
        wanted = "bf16" if training.precision == "fp8" else training.precision
        return choose_precision(wanted, self.arch, fast_bf16=self.bf16)[0]

    def attention(self, training: Training) -> Literal["flash", "math", "eager"]:
        """Which memory attention takes: `flash` (and `efficient`) never hold the scores of a whole row."""
        match training.attention:
            case "eager":
                return "eager"
            case "math":
                return "math"
            case "auto" | "flash" | "efficient":
                row = lookup(self.arch)
                best = "math" if row is None else row.attention
                return "math" if best == "math" else "flash"
