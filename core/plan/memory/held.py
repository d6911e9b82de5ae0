"""What is on the device for the whole run."""

from __future__ import annotations

from core.plan.constants import SCRATCH_BYTES
from core.plan.device import SLACK_BYTES, Device
from core.plan.memory.result import Item
from core.plan.models.scorers import scorer_bytes
from core.plan.models.shape import Shape
from core.plan.models.weights import WeightBytes
from core.plan.optimizers import state_of
from core.plan.stream import Decision
from core.spec.axes.method import Full
from core.spec.axes.quantization import QAT
from core.spec.axes.runtime import HostOffload
from core.spec.job import JobSpec
from core.spec.settled import method_of

ROUNDING_BYTES = 24
"""Bytes per weight of the layer that `quantization: qat` rounds: six float32 copies at most."""


def held_throughout(spec: JobSpec, shape: Shape, held: WeightBytes, device: Device, stream: Decision) -> list[Item]:
    """The items that are on the device for the whole run."""
    offloads = isinstance(spec.memory.offload_optimizer, HostOffload)
    kept = state_of(spec.optimizer)
    optimizer = 0 if offloads else kept.bytes(held.trained_tensors)
    scratch = max(held.largest_dense, min(SCRATCH_BYTES[device.kind], held.dense))
    streams = stream.where != "none"
    linear = (weight.numel for block in shape.patterns for weight in block if weight.kind == "linear")
    rounding = ROUNDING_BYTES * max(linear, default=0) if isinstance(spec.quantization, QAT) else 0
    return [
        Item("weights", held.stays if streams else held.weights, _weights_why(spec, shape, streams)),
        Item("reward models", scorer_weights(spec, shape, device), _scorers_why(shape)),
        Item("adapter", held.adapter, "in float32"),
        Item("slots", min(stream.slots, shape.layers) * held.largest, f"{stream.slots} of the largest block"),
        Item("optimizer", optimizer, kept.kept),
        Item("scratch", scratch, "dense copies of packed weights for the moment of a product"),
        Item("rounding", rounding, "copies of the largest weight while it is rounded, and its gradient"),
        Item("slack", SLACK_BYTES[device.kind], "the matrix libraries' buffers, the allocator's gaps"),
    ]


def scorer_weights(spec: JobSpec, shape: Shape, device: Device) -> int:
    return sum(scorer_bytes(spec, one, device) for one in shape.scorers)


def _scorers_why(shape: Shape) -> str:
    names = ", ".join(f"`{one.reward}`" for one in shape.scorers)
    return f"copies of their own, with their adapters: {names}"


def _weights_why(spec: JobSpec, shape: Shape, streams: bool) -> str:
    if isinstance(method_of(spec), Full):
        return "all of them in float32"
    how = (
        "as the files have them packed"
        if shape.packed
        else f"quantization {spec.quantization and spec.quantization.type}"
    )
    return f"what stays on the device; {how}" if streams else f"of the base model; {how}"
