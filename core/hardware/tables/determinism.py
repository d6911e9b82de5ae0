"""What two runs of one job may differ in: one class a box, with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.hardware.device_mask import Gpu


@dataclass(frozen=True, slots=True)
class DeterminismClass:
    """A promise, and what it rests on."""

    name: str
    meaning: str


EXACT = DeterminismClass(
    "exact",
    "The same job with the same versions and as many threads ends with the same weights to the bit, whether it was "
    "stopped and gone on with, or not. Tests hold this.",
)
REPEATABLE = DeterminismClass(
    "repeatable",
    "The same, on the same kind of card with the same driver and versions, for operations that have a deterministic "
    "form; torch is told to take it, and warns of an operation that has none (the warning is in the job's log).",
)
BEST_EFFORT = DeterminismClass(
    "best effort",
    "Seeds, the order of the data and what a checkpoint holds are as exact as elsewhere; sums on the card may be "
    "rounded otherwise from run to run or after an update, and so the weights.",
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
        reasons.append("the cards differ: a job that goes on elsewhere may land on another architecture")
    if reasons:
        return BEST_EFFORT, reasons
    return REPEATABLE, [
        "NVIDIA cards of one architecture; torch's deterministic algorithms and a fixed cuBLAS workspace are on"
    ]
