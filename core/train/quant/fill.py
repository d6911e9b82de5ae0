"""The tensors of a model's files, one after the other, into the model: packed where they are a linear layer's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from core.errors import ModelError
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.reading import reading
from core.train.quant.int8 import STATE_KEY as INT8_KEY
from core.train.quant.int8 import int8_from_state, quantize_int8
from core.train.quant.layout import SUFFIXES, nf4_from_state
from core.train.quant.linear import PackedWeight, QuantLinear
from core.train.quant.nf4 import quantize_nf4
from core.train.quant.targets import SKIPPED, QuantOptions

# --- the files -------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; ModelError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index.name} is not a readable index: {error!r}", field="model") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"the model's folder lacks {', '.join(missing)}; only safetensors are read", field="model")
    return files


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """By name, one after the other; each is good until the next is asked for."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 -- not a dict
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(f"{file.name} is truncated or damaged: {error}", field="model") from error


# --- into the model --------------------------------------------------------------------------------


def names_wanted(model: Any) -> set[str]:
    """Names of everything that the files must give values to."""
    return {name for name, _ in model.named_parameters()} | set(_persistent_buffers(model))


def fill_model(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    wanted: set[str],
    targets: set[str],
    kept: dict[str, str],
    dtype: torch.dtype,
    options: QuantOptions | None,
    between: Callable[[], None],
) -> None:
    """Give every parameter its values, and every target its packed module. Without options nothing is packed that the
    files have dense; `kept` then names it. `wanted`: names of what these tensors must give values to; it is used up."""
    packed_suffixes = {f"weight.{suffix}" for suffix in (*SUFFIXES, INT8_KEY)}
    tied = _tied(model)
    pieces: dict[str, dict[str, Tensor]] = {}
    packed: dict[str, PackedWeight] = {}
    for name, tensor in tensors:
        between()
        module, suffix = _split(name, targets, packed_suffixes)
        if module in targets and (suffix in packed_suffixes or (suffix == "weight" and not tensor.is_floating_point())):
            pieces.setdefault(module, {})[suffix] = tensor.clone()
        elif module in targets and suffix == "weight" and options is not None:
            packed[module] = _quantise(name, tensor.to(dtype), options)
            wanted.discard(name)
        elif module in kept and (suffix in packed_suffixes or (suffix == "weight" and tensor.dtype == torch.uint8)):
            raise ModelError(
                f"{module} is packed in the files, and would have to be dense here ({kept[module]}); "
                + ("leave it out of skip_modules, or " if kept[module] == SKIPPED else "")
                + "name the 16-bit model it was made from",
                field="quantization",
            )
        elif name in wanted:
            _set(model, name, tensor, dtype)
            wanted.discard(name)
            if module in targets and suffix == "weight":
                kept[module] = "dense in the files"
        elif name not in tied and not _ignorable(model, name):
            raise ModelError(
                f"{name} is in the files but not in the model that transformers builds: this architecture's files are "
                "read without quantisation and without `memory.stream: disk` only",
                field="model",
            )
    for module, state in pieces.items():
        dense = isinstance(model.get_submodule(module), nn.Linear) and f"weight.{INT8_KEY}" not in state
        with reading(f"{module}.weight"):
            read = (nf4_from_state if dense else int8_from_state)(state, f"{module}.weight")
        # Packed from float16, say, and trained in bfloat16: what is made of it by a merge has the run's dtype.
        packed[module] = replace(read, dtype=dtype)
        wanted.discard(f"{module}.weight")
    left_dense = sorted(wanted - tied)
    if left_dense:
        more = f" and {len(left_dense) - 1} more" if len(left_dense) > 1 else ""
        raise ModelError(f"the files lack {left_dense[0]}{more}", field="model")
    for name, weight in packed.items():
        _replace(model, name, weight)


def _split(name: str, targets: set[str], suffixes: set[str]) -> tuple[str, str]:
    for suffix in (*suffixes, "weight"):
        if name.endswith("." + suffix):
            return name[: -len(suffix) - 1], suffix
    return name, ""


def _quantise(name: str, weight: Tensor, options: QuantOptions) -> PackedWeight:
    try:
        if options.format == "int8":
            return quantize_int8(weight, options.block)
        return quantize_nf4(weight, options.block, options.double)
    except ValueError as error:
        raise ModelError(f"{name} cannot be quantised: {error}", field="model") from error


def _set(model: Any, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    parent, _, local = name.rpartition(".")
    module = model.get_submodule(parent)
    here = module._parameters.get(local)
    shape = (module._buffers[local] if here is None else here).shape
    if shape != tensor.shape:
        raise ModelError(f"{name} is {list(tensor.shape)} in the files, {list(shape)} in the model", field="model")
    # A copy: what the file is mapped to must not live as long as the model.
    narrows = here is not None and tensor.is_floating_point()
    copied = tensor.to(dtype, copy=True) if narrows else tensor.clone()
    if copied.is_floating_point() and not torch.isfinite(copied).all():
        word = str(copied.dtype).removeprefix("torch.")
        raise ModelError(f"{name} holds NaN or infinite values, or values past {word}'s range", field="model")
    if here is None:
        module._buffers[local] = copied
    else:
        module._parameters[local] = nn.Parameter(copied, requires_grad=copied.is_floating_point())


def _replace(model: Any, name: str, weight: PackedWeight) -> None:
    parent, _, local = name.rpartition(".")
    module = model.get_submodule(parent)
    dense = getattr(module, local)
    if weight.shape != (dense.out_features, dense.in_features):
        raise ModelError(
            f"{name} is {list(weight.shape)} in the files, {[dense.out_features, dense.in_features]} in the model",
            field="model",
        )
    setattr(module, local, QuantLinear(weight, None if dense.bias is None else dense.bias.detach()))


def _persistent_buffers(model: Any) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


def _tied(model: Any) -> set[str]:
    """Names that are filled by tying, whether or not the files hold them."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    keys = getattr(model, "_tied_weights_keys", None) or {}
    return set(keys)


def _ignorable(model: Any, name: str) -> bool:
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns)
