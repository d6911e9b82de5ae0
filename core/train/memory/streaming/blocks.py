"""The blocks of a model, and which of their tensors are streamed through the device.

The rule: every frozen tensor of two or more dimensions of a block is streamed (dense weights of linear layers and
fused experts), and so are the packed elements and the scales of a packed linear layer. Everything else stays on the
device: what is trained (adapters, DoRA's magnitudes), norms and biases (one dimension), constants and buffers, and
whatever is outside of the blocks (embeddings, final norm, output head, rotary frequencies).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import ModelError
from core.plan.constants import aligned
from core.train.quant.linear import QuantLinear

FIELD = "memory.stream"
PACKED_PARTS = ("packed", "absmax", "nested_absmax")
"""Buffers of a QuantLinear that are streamed; its other two are a table of 1 KiB that all share, and a number."""
_OUT = "leave `memory.stream` out"


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A streamed tensor and its place in the bytes of its block."""

    name: str
    """Name in the block, e.g. `self_attn.q_proj.packed`."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """This tensor in `flat`, uint8 [at least offset + nbytes]: the same memory, and the same version counter."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """Where a model holds a streamed tensor: a parameter (`data` is what changes), or a buffer of a packed layer."""

    owner: nn.Parameter | QuantLinear
    buffer: str = ""

    @property
    def tensor(self) -> Tensor:
        if isinstance(self.owner, nn.Parameter):
            return self.owner
        found = self.owner._buffers[self.buffer]
        assert found is not None
        return found

    def put(self, tensor: Tensor) -> None:
        if isinstance(self.owner, nn.Parameter):
            self.owner.data = tensor
        else:
            self.owner._buffers[self.buffer] = tensor


@dataclass(frozen=True, slots=True, eq=False)
class StreamedBlock:
    """A block of a model with what is streamed of it; `parts` and `places` go together."""

    name: str
    """Name in the model, e.g. `model.layers.3`."""
    module: nn.Module
    parts: tuple[StreamedTensor, ...]
    places: tuple[TensorRef, ...]

    @property
    def nbytes(self) -> int:
        """Size of the streamed tensors with the gaps between them, bytes."""
        return self.parts[-1].offset + self.parts[-1].nbytes

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Point the model at these tensors."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.put(tensor)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [part.view(flat) for part in self.parts]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of each block, in the order in which the model runs them. ModelError when there are none."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    lists = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and _marked(base, module)
    ]
    if not lists:
        raise ModelError(
            f"no blocks are found in {type(base).__name__}: it has no list of layers that transformers marks as blocks"
            f"; {_OUT}",
            field=FIELD,
            code="blocks_not_found",
        )
    if hasattr(base.get_submodule(base.base_model_prefix or ""), "_rescale_layers"):
        raise ModelError(
            f"{type(base).__name__} rewrites weights of its blocks where it evaluates (`rescale_every`), and what is "
            f"streamed is never copied back: {_OUT}",
            field=FIELD,
            code="blocks_shared",
        )
    name, found = max(lists, key=lambda item: sum(_numel(module) for module in item[1]))
    return [(f"{name}.{number}", module) for number, module in enumerate(found)]


def _marked(base: Any, layers: nn.ModuleList) -> bool:
    """transformers marks a block by its class: one that can be checkpointed, or one that must not be split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    whole = set(getattr(base, "_no_split_modules", None) or ())
    return len(layers) > 0 and all(
        isinstance(layer, GradientCheckpointingLayer) or type(layer).__name__ in whole for layer in layers
    )


def _numel(module: nn.Module) -> int:
    packed = sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, QuantLinear))
    return packed + sum(p.numel() for p in module.parameters())


def lay_out(model: nn.Module, *, trained: bool = True) -> list[StreamedBlock]:
    """The blocks of a model with what is streamed of them, each laid out in bytes of its own. `trained`: parameters
    with `requires_grad` are trained, so they stay; otherwise nothing is trained yet. ModelError when there are no
    blocks, or when blocks share memory with one another or with the rest of the model."""
    found = find_blocks(model)
    _check_distinct(model, found)
    return [lay_out_block(name, module, trained=trained) for name, module in found]


def lay_out_block(name: str, module: nn.Module, *, trained: bool) -> StreamedBlock:
    parts, places, offset = [], [], 0
    for local, place in _streamed(module, trained):
        tensor = place.tensor
        parts.append(StreamedTensor(local, tensor.dtype, tuple(tensor.shape), offset))
        places.append(place)
        offset += aligned(parts[-1].nbytes)
    if not parts:
        raise ModelError(
            f"nothing of {name} is frozen, so nothing of it can be streamed: {_OUT}",
            field=FIELD,
            code="blocks_not_found",
        )
    return StreamedBlock(name, module, tuple(parts), tuple(places))


def _streamed(block: nn.Module, trained: bool) -> Iterator[tuple[str, TensorRef]]:
    for prefix, module in block.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, QuantLinear):
            for name in PACKED_PARTS:
                if module._buffers[name] is not None:
                    yield dot + name, TensorRef(module, name)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() >= 2 and not (trained and parameter.requires_grad):
                yield dot + name, TensorRef(parameter)


def _check_distinct(model: nn.Module, found: Sequence[tuple[str, nn.Module]]) -> None:
    """No block twice, and no tensor in two blocks, or in a block and outside: a slot can be only one of them."""
    first: dict[int, str] = {}
    for name, module in found:
        if id(module) in first:
            raise ModelError(
                f"{name} is the same block as {first[id(module)]}: shared blocks cannot be streamed; {_OUT}",
                field=FIELD,
                code="blocks_shared",
            )
        first[id(module)] = name
    owner: dict[tuple[str, int], str] = {}
    tensors = [(name, place.tensor) for name, module in found for _, place in _streamed(module, trained=False)]
    tensors += [("the rest of the model", tensor) for tensor in reached_past(model, [module for _, module in found])]
    for name, tensor in tensors:
        key = ("meta", id(tensor)) if tensor.is_meta else ("at", tensor.data_ptr())
        other = owner.setdefault(key, name)
        if other != name and tensor.numel():
            raise ModelError(
                f"{name} shares a weight with {other}: tied blocks cannot be streamed; {_OUT}",
                field=FIELD,
                code="blocks_shared",
            )


def reached_past(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters of all that can be reached past the blocks: a module may be in a block and outside as well."""
    seen, ahead, found = {id(block) for block in blocks}, [model], list[Tensor]()
    while ahead:
        module = ahead.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found += [parameter for parameter in module._parameters.values() if parameter is not None]
            ahead += module.children()
    return found
