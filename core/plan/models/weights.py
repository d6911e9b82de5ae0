"""Bytes of the base weights, packed or not, and of the adapters: what is in memory for the whole run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from core.errors import SpecError
from core.plan.constants import NESTED_BLOCK, NESTED_MAP, QUANT_BLOCK, aligned
from core.plan.device import Device
from core.plan.models.freeze import layers_of, trained_names
from core.plan.models.shape import ADAPTABLE, Selected, Shape, Weight
from core.plan.models.whole import whole_weights, without
from core.plan.optimizers import TrainedTensor, check_groups, largest_block
from core.spec.axes.method import OFT, Full, LowRank
from core.spec.axes.optim.optimizers import BAdam
from core.spec.axes.quantization import NF4, QAT, Int8, NoQuantization
from core.spec.axes.runtime import HostOffload
from core.spec.axes.stage import Head
from core.spec.job import JobSpec
from core.spec.settled import method_of

TARGETS = "method.target_modules"
ROWS = "token_adapter.trainable_tokens_delta"
"""Name of the rows of new tokens, in PEFT's files."""

NEW_HEADS: dict[Head, tuple[int, int]] = {"tokens": (0, 0), "score": (1, 0), "labels": (2, 2)}
"""Outputs of a stage's new head, and how many of them have a bias; none: the model keeps its own."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights of a run."""

    outside: int
    """Base weights outside of the blocks."""
    frozen: tuple[int, ...]
    """Base weights that would be streamed, for each block."""
    aligned: tuple[int, ...]
    """The same with the alignment of a slot."""
    still: int
    """Base weights of all blocks that would not be streamed: norms, biases, tables of packed layers."""
    adapter: int
    """Adapter weights in float32."""
    starts: int
    """Numbers of the weights that adapters began with, where they keep those."""
    trained_tensors: tuple[TrainedTensor, ...]
    trained: int
    """Trained parameters."""
    stepped: int
    """Those that have gradients at a time."""
    dense: int
    """Packed weights, unpacked into the precision of products."""
    largest_dense: int
    """The largest packed weight, unpacked."""
    adapted: tuple[frozenset[str], ...]
    """Names of the linear layers with an adapter, for each block."""
    copied: int
    """The embedding, and the output head that is another matrix, with the rows of new tokens written into a copy, and
    the gradient of the copy."""
    head: bool
    """The output head has an adapter or rows of new tokens: its logits are made whole."""
    first: int
    """Number of the first block that has a gradient."""

    @property
    def gradients(self) -> int:
        """Bytes of the gradients, in float32."""
        return 4 * self.stepped

    @property
    def stays(self) -> int:
        return self.outside + self.still

    @property
    def weights(self) -> int:
        """Bytes of all base weights."""
        return self.stays + sum(self.frozen)

    @property
    def largest(self) -> int:
        return max(self.aligned, default=0)


@dataclass(slots=True)
class _PartBytes:
    """Bytes of the base weights of a block, or of those outside of the blocks."""

    frozen: int = 0
    aligned: int = 0
    still: int = 0
    dense: int = 0
    largest_dense: int = 0


def headed(spec: JobSpec, shape: Shape) -> Shape:
    """The shape without the output head that a reward model does not have."""
    if spec.stage.head == "tokens":
        return shape
    return replace(shape, vocab=0, outside=tuple(weight for weight in shape.outside if weight.kind != "head"))


def _new_head(spec: JobSpec, shape: Shape) -> list[TrainedTensor]:
    """The tensors of the new head of a stage."""
    outputs, biases = NEW_HEADS[spec.stage.head]
    sizes: dict[str, tuple[int, ...]] = {"score.weight": (outputs, shape.hidden), "score.bias": (biases,)}
    return [TrainedTensor(size, False, name) for name, size in sizes.items() if size[0]]


def weigh(spec: JobSpec, shape: Shape, device: Device) -> WeightBytes:
    """SpecError where the spec names modules that the model does not have."""
    method = method_of(spec)
    full = isinstance(method, Full)
    width = 4 if full or device.precision(spec.training) == "fp32" else 2
    pack, packed = _packing(spec, shape), _packed(spec, shape)
    halved = full and isinstance(spec.memory.offload_optimizer, HostOffload) and spec.training.precision != "fp8"
    linear = 2 if halved and device.precision(spec.training) != "fp32" else width
    outside = _measure(shape.outside, packed[0], pack, width, width)
    chosen_part = method.train if isinstance(method, Full) else None
    whole = range(shape.layers) if chosen_part is None else layers_of(chosen_part, shape.layers)
    blocks = [
        _measure(block, names, pack, width, linear if number in whole else width)
        for number, (block, names) in enumerate(zip(shape.blocks, packed[1], strict=True))
    ]
    targets: Selected = (frozenset(), (frozenset(),) * shape.layers)
    tensors: list[TrainedTensor] = []
    first = starts = places = copied = 0
    if not isinstance(method, Full):
        targets = without(shape.targets(method), method.modules_to_save, shape)
        for prefix, part, names in _parts(shape, targets):
            for weight in part:
                if weight.kind in ADAPTABLE and weight.module in names:
                    tensors += (
                        _rotation(method, weight, prefix)
                        if isinstance(method, OFT)
                        else _adapter(method, weight, prefix)
                    )
        starts = 0 if not isinstance(method, LowRank) or not method.started else sum(t.numel for t in tensors)
        places = _places(tensors) if isinstance(method, OFT) else 0
        tensors += (
            TrainedTensor(w.shape, len(w.shape) == 2 and w.kind not in ("embedding", "head"), name)
            for name, w in whole_weights(shape, method.modules_to_save, packed)
        )
        if isinstance(method, LowRank) and method.new_tokens:
            ends = _ends(spec, shape)
            copied = 2 * width * sum(weight.numel for _, weight in ends)
            tensors += (
                TrainedTensor((len(method.new_tokens), shape.hidden), False, f"{module}.{ROWS}") for module, _ in ends
            )
    else:
        tensors = [
            TrainedTensor(w.shape, len(w.shape) == 2 and w.kind not in ("embedding", "head"), f"{prefix}{w.name}")
            for prefix, part, _ in _parts(shape, targets)
            for w in part
        ]
        if (asked := method.train) is not None:
            if spec.stage.head != "tokens":  # a new head is always trained
                asked = asked.model_copy(update={"head": False})
            every = (tensor.name for tensor in tensors)
            chosen = trained_names(asked, every, shape.list_name, shape.layers, tied=shape.tied)
            tensors = [tensor for tensor in tensors if tensor.name in chosen]
            if not (asked.embeddings or asked.norms):
                first = min(layers_of(asked, shape.layers), default=shape.layers)
    new = _new_head(spec, shape)
    tensors += new
    if not shape.experts:  # their parameters have other names in memory
        check_groups(spec.optimizer.parameter_groups, (tensor.name for tensor in tensors))
    count, head = sum(tensor.numel for tensor in tensors), sum(tensor.numel for tensor in new)
    return WeightBytes(
        outside=outside.frozen + outside.still + 4 * head,
        frozen=tuple(block.frozen for block in blocks),
        aligned=tuple(block.aligned for block in blocks),
        still=sum(block.still for block in blocks),
        adapter=0 if full else 4 * count + 4 * starts + places,
        starts=starts,
        trained_tensors=tuple(tensors),
        trained=count,
        stepped=largest_block(tensors, lambda t: t.numel) if isinstance(spec.optimizer, BAdam) else count,
        dense=sum(part.dense for part in (outside, *blocks)),
        largest_dense=max(part.largest_dense for part in (outside, *blocks)),
        adapted=targets[1],
        copied=copied,
        head=(copied > 0 and shape.vocab > 0)
        or any(weight.kind == "head" and weight.module in targets[0] for weight in shape.outside),
        first=first,
    )


def _ends(spec: JobSpec, shape: Shape) -> list[tuple[str, Weight]]:
    """(module, weight) of the embedding, and of the output head where that is another matrix."""
    kinds = ("embedding", "head") if spec.stage.head == "tokens" and not shape.tied else ("embedding",)
    found = [max((w for w in shape.outside if w.kind == kind), key=lambda w: w.shape[0]) for kind in kinds]
    return [(weight.module, weight) for weight in found]


def _parts(shape: Shape, selected: Selected) -> Iterator[tuple[str, tuple[Weight, ...], frozenset[str]]]:
    """What is outside of the blocks, then each block: beginning of its names, weights, selected modules."""
    yield "", shape.outside, selected[0]
    for number, (block, names) in enumerate(zip(shape.blocks, selected[1], strict=True)):
        yield f"{shape.list_name}.{number}.", block, names


def _adapter(method: LowRank, weight: Weight, prefix: str) -> Iterator[TrainedTensor]:
    """The tensors of an adapter on a weight, by PEFT's names."""
    module = f"{prefix}{weight.module}"
    a, b = "lora_A.weight", "lora_B.weight"
    if weight.kind == "embedding":
        a, b = "lora_embedding_A", "lora_embedding_B"
    yield TrainedTensor((method.r, weight.inputs), True, f"{module}.{a}")
    yield TrainedTensor((weight.outputs, method.r), True, f"{module}.{b}")
    if method.started:
        check_started(method, weight.kind, weight.outputs, weight.inputs, module)
    if method.use_dora:
        yield TrainedTensor((weight.outputs,), False, f"{module}.lora_magnitude_vector.weight")


def check_started(method: LowRank, kind: str, outputs: int, inputs: int, module: str) -> None:
    """SpecError where a weight has no such beginning of an adapter."""
    how = f"`init_lora_weights: {method.init_lora_weights}`"
    if kind != "linear":
        raise SpecError(f"{how} decomposes the weights of linear layers, and {module} is none", field=TARGETS)
    if method.r > min(outputs, inputs):
        words = f"{how} takes {method.r} directions of each weight, and {module} has {min(outputs, inputs)}"
        raise SpecError(f"{words}; lower `r`, or leave that layer out of `target_modules`", field="method.r")


def _rotation(method: OFT, weight: Weight, prefix: str) -> Iterator[TrainedTensor]:
    """The tensor of a rotation on a weight. SpecError where its inputs cannot be divided into blocks."""
    module = f"{prefix}{weight.module}"
    if weight.kind != "linear":
        raise SpecError(f"`method: oft` rotates the inputs of linear layers, and {module} is none", field=TARGETS)
    if (size := method.block_of(weight.inputs)) is None:
        field = "method.r" if method.r is not None else "method.oft_block_size"
        raise SpecError(f"{module} has {weight.inputs} inputs, which this does not divide", field=field)
    yield TrainedTensor((weight.inputs // size, size * (size - 1) // 2), True, f"{module}.oft_R.weight")


def _places(rotations: Collection[TrainedTensor]) -> int:
    """Bytes of the numbers of rows and columns that PEFT keeps for each rotation."""
    return sum(2 * 8 * tensor.shape[1] for tensor in rotations)


def _measure(
    part: Collection[Weight], packed: frozenset[str], pack: _Packing | None, other: int, linear: int
) -> _PartBytes:
    """Bytes of a number that is not packed: `linear` of a linear layer's weight, else `other`. With the optimizer's
    state on the host the device has what products are made of (core/train/memory/offload/optimizer.py)."""
    found = _PartBytes()
    for weight in part:
        width = linear if weight.kind == "linear" else other
        if pack is not None and weight.kind == "linear" and weight.module in packed:
            tensors, beside = pack.bytes(weight.numel)
            found.still += beside
            found.dense += weight.numel * width
            found.largest_dense = max(found.largest_dense, weight.numel * width)
        elif len(weight.shape) >= 2:
            tensors = (weight.numel * width,)
        else:
            tensors = ()
            found.still += weight.numel * width
        found.frozen += sum(tensors)
        found.aligned += sum(aligned(size) for size in tensors)
    return found


@dataclass(frozen=True, slots=True)
class _Packing:
    bits: int
    block: int
    double: bool

    def bytes(self, numel: int) -> tuple[tuple[int, ...], int]:
        """(of elements and scales, each a tensor; of the table and offset beside them): `core.train.quant.layout`."""
        elements, scales = -(-numel * self.bits // 8), -(-numel // self.block)
        if self.double:
            return (elements, scales, 4 * -(-scales // NESTED_BLOCK)), 4 * NESTED_MAP + 4
        return (elements, 4 * scales), 0


def _packing(spec: JobSpec, shape: Shape) -> _Packing | None:
    match spec.quantization:
        case NF4(double=double):
            return _Packing(4, QUANT_BLOCK, shape.packed_double if shape.packed else double)
        case Int8(block_size=block):
            return _Packing(8, block, False)
        case None | NoQuantization() | QAT():
            return _Packing(4, QUANT_BLOCK, shape.packed_double) if shape.packed else None
        case _ as never:
            assert_never(never)


def _packed(spec: JobSpec, shape: Shape) -> Selected:
    """The linear layers with packed weights."""
    if isinstance(spec.quantization, NF4 | Int8) and not shape.packed:
        return shape.packable(spec.quantization.skip_modules)
    if not shape.packed:
        return frozenset(), (frozenset(),) * shape.layers
    return (
        frozenset(weight.module for weight in shape.outside if weight.dtype == "NF4"),
        tuple(frozenset(weight.module for weight in block if weight.dtype == "NF4") for block in shape.blocks),
    )
