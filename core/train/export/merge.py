"""A model with its adapter added to its weights, written shard by shard: dequantise → add in float32 → round once.

Each layer is merged by its own adapter layer (so DoRA and rslora as PEFT has them) over a float32 copy of its weight;
the model itself stays as it is. At no time are there more dense weights in memory than one shard and one layer.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion

from core.train.base.shards import SHARD_BYTES, write_shards
from core.train.memory.streaming.stream import on_device
from core.train.model.heads import has_head
from core.train.model.load import stored_tensor
from core.train.quant.linear import QuantLinear
from core.train.vocabulary.rows import with_rows


def write_merged(
    model: Any,
    folder: Path,
    *,
    model_dir: Path,
    dtype: torch.dtype,
    original: bool = False,
    between: Callable[[], None] = lambda: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what `from_pretrained(folder)` of the model's class reads, without the tokenizer. `model` is a PeftModel
    whose base came from `model_dir`; `original` takes packed layers' weights from the files there, as they were before
    they were packed. `between` runs after every layer and may raise. ValueError when an adapter holds NaN."""
    folder.mkdir(parents=True)
    base = model.get_base_model()
    # Closed also when the writing is broken off (a full disk, a stop), so that no layer stays merged.
    with _returned_when_freed(), closing(merged_tensors(base, dtype, model_dir if original else None)) as tensors:
        write_shards(as_in_files(base, tensors), folder, between, shard_bytes)
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if any(isinstance(layer, BaseTunerLayer) for layer in (base.get_input_embeddings(), base.get_output_embeddings())):
        # Two matrices from here on: an adapter changed one of them alone, and tying would undo it without a word.
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.get_text_config().vocab_size = base.config.get_text_config().vocab_size  # larger with new tokens
    if has_head(base):
        config.num_labels, config.id2label = base.config.num_labels, base.config.id2label
        config.label2id = base.config.label2id
        config.get_text_config().pad_token_id = base.config.get_text_config().pad_token_id
    config.dtype = dtype
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
    if (model_dir / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(model_dir, local_files_only=True).save_pretrained(folder)


M_MMAP_THRESHOLD, APART_BYTES, MOST_BYTES = -3, 2**20, 32 * 2**20
"""mallopt(3): the parameter, its value within a merge, and the one that glibc itself would arrive at."""


@contextmanager
def _returned_when_freed() -> Iterator[None]:
    """Within, glibc returns each layer to the kernel as soon as it is freed. It otherwise keeps them in its heap, where
    small objects between them let it grow by half a layer with every layer. Nothing happens under another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, APART_BYTES)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MOST_BYTES)


def as_in_files(base: Any, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by their names and shapes in files: transformers renames or fuses some while it loads them (experts).
    A tensor waits for those alone that become the same ones of the files."""
    if not getattr(base, "_weight_conversions", None):
        yield from tensors
        return
    undone = [one.reverse_transform() for one in base._weight_conversions[::-1]]
    converters = [one for one in undone if isinstance(one, WeightConverter)]

    def group(name: str) -> str:
        found, pattern = apply_converters(name, converters)
        return name if pattern is None else found

    left = Counter(group(name) for name in _names(base))
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        key = group(name)
        waiting.setdefault(key, {})[name] = tensor
        left[key] -= 1
        if left[key] == 0:
            yield from revert_weight_conversion(base, waiting.pop(key)).items()
    if waiting:
        raise ValueError(f"{min(waiting)} waits for weights that the model does not have")


def _names(base: nn.Module) -> Iterator[str]:
    """Names of what `merged_tensors` makes."""
    seen: set[int] = set()
    for prefix, module in _places(base):
        match module:
            case BaseTunerLayer():
                names = [name for name, _ in _parameters(module.get_base_layer())]
            case TrainableTokensWrapper():
                names = ["weight"]
            case AuxiliaryTrainingWrapper():
                names = [name for name, _ in _parameters(module.modules_to_save[module.active_adapter])]
            case _:
                names = [name for name, _ in _parameters(module, seen)]
        yield from (f"{prefix}.{name}" if prefix else name for name in names)


def _places(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, without what is inside of an adapter's layer."""
    within: str | None = None
    for prefix, module in base.named_modules():
        if within is not None and prefix.startswith(within):
            continue
        if isinstance(module, BaseTunerLayer | TrainableTokensWrapper | AuxiliaryTrainingWrapper):
            within = f"{prefix}."
        yield prefix, module


@torch.no_grad()
def merged_tensors(
    base: nn.Module, dtype: torch.dtype, originals: Path | None
) -> Generator[tuple[str, Tensor], None, None]:
    """(name, tensor on the CPU) of every weight, one after the other; a tensor that is tied to another comes once."""
    seen: set[int] = set()
    for prefix, module in _places(base):
        match module:
            case BaseTunerLayer():
                values = _merged(module, prefix, originals)
            case TrainableTokensWrapper():
                weight = with_rows(module)
                values = iter(() if weight is None else [("weight", weight)])
            case AuxiliaryTrainingWrapper():
                values = _parameters(module.modules_to_save[module.active_adapter])
            case QuantLinear():
                values = _parameters(_dense(module, prefix, originals))
            case _:
                values = _parameters(module, seen)
        made = isinstance(module, BaseTunerLayer | QuantLinear)  # copies; the others are weights as they lie
        with on_device(module) if made else nullcontext():
            for name, tensor in values:
                to = dtype if tensor.is_floating_point() else tensor.dtype
                yield f"{prefix}.{name}" if prefix else name, tensor.to("cpu", to).contiguous()


def _merged(layer: Any, prefix: str, originals: Path | None) -> Iterator[tuple[str, Tensor]]:
    base = layer.get_base_layer()
    layer.base_layer = _dense(base, prefix, originals)
    try:
        layer.merge(safe_merge=True)
        yield from _parameters(layer.base_layer)
    finally:
        layer.base_layer = base
        layer.merged_adapters.clear()
        getattr(layer, "_caches", {}).clear()  # what DoRA keeps for an unmerge


def _dense(base: nn.Module, prefix: str, originals: Path | None) -> nn.Module:
    """A float32 copy of a layer, dense."""
    if not isinstance(base, QuantLinear):
        return copy.deepcopy(base).float()
    dense = base.dense(torch.float32)
    if originals is not None:
        dense.weight.copy_(stored_tensor(originals, f"{prefix}.weight"))
    return dense


def _parameters(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The module's own weights and persistent buffers."""
    for name, parameter in module._parameters.items():
        if parameter is not None and (seen is None or id(parameter) not in seen):
            if seen is not None:
                seen.add(id(parameter))
            yield name, parameter.detach()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
