"""Determinism classes: how two runs of one job may differ on a box, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.hardware.device_mask import Gpu


@dataclass(frozen=True, slots=True)
class DeterminismClass:
    """A name and the promise behind it."""

    name: str
    meaning: str


EXACT = DeterminismClass(
    "exact",
    "The same job with the same versions and number of threads ends with bitwise the same weights, whether or not it "
    "was stopped and resumed. This is tested.",
)
REPEATABLE = DeterminismClass(
    "repeatable",
    "The same on the same kind of GPU with the same driver and versions, for operations with a deterministic "
    "implementation. torch uses it, and writes a warning to the job's log for an operation without one.",
)
BEST_EFFORT = DeterminismClass(
    "best effort",
    "Seeds, data order and checkpoints are exact. Sums on the GPU, and therefore the weights, may be rounded "
    "differently from run to run or after an update.",
)
CLASSES = (EXACT, REPEATABLE, BEST_EFFORT)


def classify(gpus: Sequence[Gpu]) -> tuple[DeterminismClass, list[str]]:
    """(the class of a box that serves these GPUs, its reasons). No GPU: the CPU."""
    if not gpus:
        return EXACT, ["jobs train on the CPU; a run's last bits depend on its number of threads, which is recorded"]
    reasons = []
    if any(gpu.vendor == "amd" for gpu in gpus):
        reasons.append("ROCm's libraries choose kernels by version and card, and not all of them sum in a fixed order")
    if len({gpu.arch for gpu in gpus}) > 1:
        reasons.append("the cards differ: a job that continues elsewhere may land on another architecture")
    if reasons:
        return BEST_EFFORT, reasons
    return REPEATABLE, [
        "NVIDIA cards of one architecture; torch's deterministic algorithms and a fixed cuBLAS workspace are on"
    ]
