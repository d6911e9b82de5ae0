"""What a job takes beside the device: on the host and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from core.plan.constants import GGUF_BITS, PIECE_BYTES
from core.plan.device import Device
from core.plan.memory.result import Item
from core.plan.models.shape import Shape
from core.plan.models.weights import WeightBytes
from core.plan.optimizers import state_of
from core.plan.stream import Decision
from core.spec.axes.export import (
    AWQ,
    FP8,
    GGUF,
    GPTQ,
    MXFP4,
    LMEval,
    Merged,
    PackedExport,
    TorchAOInt4,
    TorchAOInt8,
    VLLMAdapter,
)
from core.spec.axes.method import Full
from core.spec.axes.quantization import NF4, Int8
from core.spec.axes.runtime import HeldOut, HostOffload
from core.spec.job import JobSpec
from core.spec.settled import method_of

PROCESS_BYTES = 1536 << 20
"""Host memory of a trainer before it has a model: Python, torch, transformers, the driver's mappings."""


def host_items(spec: JobSpec, held: WeightBytes, device: Device, stream: Decision) -> Iterable[Item]:
    if not device.one_memory:
        yield Item("process", PROCESS_BYTES, "Python, torch, transformers")
    if isinstance(spec.memory.offload_optimizer, HostOffload):
        yield Item(
            "optimizer",
            state_of(spec.optimizer).trained(held.trained_tensors),
            f"weights and gradients in float32; {state_of(spec.optimizer).kept}",
        )
        if not device.one_memory:
            yield Item("staging", 2 * PIECE_BYTES, "gradients and weights on their way")
    match stream.where:
        case "none":
            if not device.one_memory:
                yield Item("loading", held.weights, "the weights on their way to the device")
        case "host":
            yield Item("blocks", sum(held.aligned), "the frozen blocks, streamed from here")
        case "disk":
            if not device.one_memory:
                yield Item("blocks", 2 * held.largest, "two of the frozen blocks, on their way from disk")
        case _ as never:
            assert_never(never)


def disk_items(spec: JobSpec, shape: Shape, held: WeightBytes, stream: Decision) -> Iterable[Item]:
    one = state_of(spec.optimizer).trained(held.trained_tensors) + 4 * held.starts
    yield Item(
        "checkpoints",
        one * (spec.checkpoint.most_kept + 1),
        f"{spec.checkpoint.most_kept} are kept while the next is written; weights, optimizer, gradients",
    )
    if isinstance(spec.evaluation, HeldOut) and spec.evaluation.load_best_model_at_end:
        yield Item(
            "best weights", 2 * 4 * (held.trained + held.starts), "of the best evaluation, and of the one before"
        )
    whole = held.weights
    if stream.where == "disk":
        yield Item("image", whole, "the blocks as they are streamed, kept in the cache")
    elif isinstance(spec.quantization, NF4 | Int8) and not shape.packed:
        yield Item("packed weights", whole, "kept in the cache for further runs")
    size = shape.parameters * shape.file_bits // 8
    adapter = 4 * (held.trained + held.starts)
    yield Item("result", size if isinstance(method_of(spec), Full) else adapter, "the job's results")
    for export in spec.export:
        match export:
            case Merged(dtype=dtype):
                yield Item("export", shape.parameters * (4 if dtype == "fp32" else 2), "`merged`: the whole model")
            case GGUF(quantization=quantization):
                size = int(GGUF_BITS[quantization] * shape.parameters / 8)
                yield Item("export", size, f"`gguf`: the whole model in {quantization}")
            case VLLMAdapter():
                yield Item("export", adapter, "`vllm`: the adapter")
            case FP8() | GPTQ() | AWQ() | MXFP4() | TorchAOInt8() | TorchAOInt4():
                yield Item("export", shape.parameters * 2, f"`{export.type}`: the whole model, counted in 16 bits")
            case LMEval():
                pass  # a few numbers and the answers
            case _ as never:
                assert_never(never)
    onto = {export.merge_onto for export in spec.export if isinstance(export, GGUF | PackedExport)}
    if onto:
        merged = 0 if isinstance(method_of(spec), Full) else 4
        size = (merged + 2) * shape.parameters * len(onto)
        yield Item("conversion", size, "the model as it is converted: merged in float32, and in 16 bits")
