"""A causal language model with packed linear layers, read shard by shard: the dense weights are never all in memory.

The skeleton is built without memory for its parameters; every tensor of the files is then read, quantised where it is a
linear layer's weight, and let go. The host needs the packed size, the layers that stay as they are, and one tensor.

Stays as it is: the output head and everything tied to it, embeddings, norms, and what the caller names. Refused by
name: Conv1D layers (their weight is transposed) and fused expert weights (three dimensions), which would leave most
of such a model dense; a base that is quantised already, unless it is NF4 as bitsandbytes writes it, which is taken as
it is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from core.errors import ModelError
from core.train.failures import is_out_of_memory
from core.train.files import sha256
from core.train.kernels.interface import Format
from core.train.quant import cache
from core.train.quant.int8 import STATE_KEY as INT8_KEY
from core.train.quant.int8 import int8_from_state, quantize_int8
from core.train.quant.layout import SUFFIXES, nf4_from_state
from core.train.quant.linear import PackedWeight, QuantLinear
from core.train.quant.nf4 import quantize_nf4

log = logging.getLogger("eft.train.quant")

SKIPPED = "named in skip_modules"


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What was done: part of the run record."""

    format: Format
    layers: int
    """Linear layers with packed weights."""
    packed_bytes: int
    dense_bytes: int
    """What these layers would take in the run's dtype."""
    kept: dict[str, str] = field(default_factory=dict)
    """Linear layers left dense, and why."""
    source: str = "quantised"
    """`quantised` from dense files, `cache`, or `as it is` (the files were packed already)."""
    seconds: float = 0.0
    cache_fault: str | None = None
    """Why an entry of the cache could not be used, or not be written."""


@dataclass(frozen=True, slots=True)
class QuantOptions:
    format: Format = "nf4"
    double: bool = True
    """Double quantisation (NF4)."""
    block: int = 64
    skip: tuple[str, ...] = ()
    """Further modules to leave dense: full names, or their last part."""


def load_quantized(
    folder: Path,
    dtype: torch.dtype,
    options: QuantOptions | None = None,
    cache_dir: Path | None = None,
    *,
    between: Callable[[str], None] = lambda doing: None,
    digest: Callable[[Path], str] = sha256,
) -> tuple[nn.Module, QuantReport]:
    """A transformers causal language model from a local folder, on the CPU, in eval mode; everything that is not packed
    is in `dtype`. With `cache_dir` the packed weights are written there under a hash of the files and options, and read
    from there the next time; a cache that cannot be read or written costs time, and `cache_fault` says so. `between` is
    called after every tensor and every large file with what is being done ("loading" or "quantizing"), and may raise;
    `digest` answers a file's SHA-256. ModelError when the files cannot be read or the model cannot be quantised."""
    options = options or QuantOptions()
    started = time.perf_counter()
    model, config = _skeleton(folder, dtype)
    already = _already_quantised(config, options)
    targets, kept = _targets(model, options)
    source, read_from, key, fault = "as it is" if already else "quantised", folder, "", None
    if cache_dir is not None and not already:

        def hashed(path: Path) -> str:
            between("loading")
            return digest(path)

        key = cache.key(folder, _weight_files(folder), options, dtype, hashed)
        hit, fault = cache.lookup(cache_dir, key)
        if hit is not None:
            source, read_from = "cache", hit
    doing = "quantizing" if source == "quantised" else "loading"
    how = None if already else options
    _fill(model, _tensors(read_from), _wanted(model), targets, kept, dtype, how, lambda: between(doing))
    model.tie_weights()
    _finish(model, folder)
    if cache_dir is not None and source == "quantised":
        between(doing)
        fault = cache.store(cache_dir, key, model, options, sorted(kept)) or fault
    report = report_of(model, options, dtype, kept, source)
    return model, replace(report, cache_fault=fault, seconds=time.perf_counter() - started)


def report_of(
    model: nn.Module, options: QuantOptions, dtype: torch.dtype, kept: dict[str, str], source: str
) -> QuantReport:
    packed = [m for m in model.modules() if isinstance(m, QuantLinear)]
    return QuantReport(
        format=options.format,
        layers=len(packed),
        packed_bytes=sum(m.quantized.nbytes for m in packed),
        dense_bytes=sum(m.in_features * m.out_features for m in packed) * dtype.itemsize,
        kept=kept,
        source=source,
    )


# --- the skeleton ----------------------------------------------------------------------------------


def _skeleton(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Buffers outside the files (rotary frequencies) are computed by the constructors, so they get real memory.
        with init_empty_weights(include_buffers=False), _without_memory(nn.Linear, nn.Embedding):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"the model cannot be read: {error}", field="model") from error
    _compute_constants(model, model)
    return model, config


def _compute_constants(module: Any, owner: Any) -> None:
    """Constants that are in no file (rotary positions) are made by `dtype`'s arithmetic in the constructors: GPT-J's
    would be off by whole positions in bfloat16. `from_pretrained` makes them again in float32, by the same method."""
    for child in module.children():
        _compute_constants(child, child if hasattr(child, "_init_weights") else owner)
    if module._non_persistent_buffers_set and not module._parameters:
        with torch.no_grad():
            owner._init_weights(module)


@contextmanager
def _without_memory(*layers: type[nn.Module]) -> Iterator[None]:
    """Within, these layers make their weights on the meta device. accelerate makes them first and drops them then: no
    memory is touched, but it is taken from the kernel, which counts it where that is limited (RLIMIT_DATA)."""

    def on_meta(init: Callable[..., None]) -> Callable[..., None]:
        at = list(signature(init).parameters).index("device")

        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **(kwargs if len(args) >= at else {"device": "meta"} | kwargs))

        return wrapped

    inits = [layer.__init__ for layer in layers]
    for layer in layers:
        layer.__init__ = on_meta(layer.__init__)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, init in zip(layers, inits, strict=True):
            layer.__init__ = init  # type: ignore[method-assign]


def _already_quantised(config: Any, options: QuantOptions) -> bool:
    """True for NF4 files of bitsandbytes and for our own int8; ModelError for other formats."""
    about = getattr(config, "quantization_config", None)
    if about is None:
        return False
    about = about if isinstance(about, dict) else about.to_dict()
    method = about.get("quant_method", "an unknown method")
    if method == cache.INT8_METHOD and options.format == "int8":
        return True
    nf4 = method == "bitsandbytes" and about.get("load_in_4bit") and about.get("bnb_4bit_quant_type") == "nf4"
    if not nf4:
        raise ModelError(
            f"the model is already quantised ({method}); only NF4 of bitsandbytes is taken as it is: name the 16-bit "
            "original instead",
            field="model",
        )
    if options.format != "nf4":
        raise ModelError(
            f"the model is already quantised as nf4 and cannot become {options.format}: ask for nf4, or name the "
            "16-bit original",
            field="quantization",
        )
    return True


def _targets(model: Any, options: QuantOptions) -> tuple[set[str], dict[str, str]]:
    """Names of the layers to pack; names of other linear layers with the reason."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    targets: set[str] = set()
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise ModelError(
                f"{name} is a Conv1D layer, whose weight is transposed; models of the GPT-2 kind are not quantised: "
                "train them without quantisation",
                field="quantization",
            )
        for local, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 3 and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                raise ModelError(
                    f"{name}.{local} has {parameter.dim()} dimensions (fused experts): mixtures of experts are not "
                    "quantised yet: train without quantisation",
                    field="quantization",
                )
        if not isinstance(module, nn.Linear):
            continue
        if module is head or (embedding is not None and module.weight is embedding.weight):
            kept[name] = "output head"
        elif type(module) is not nn.Linear:
            kept[name] = f"a {type(module).__name__}"
        elif any(_is(name, skip) for skip in options.skip):
            kept[name] = SKIPPED
        else:
            targets.add(name)
    for skip in options.skip:
        if not any(_is(name, skip) for name in (*targets, *kept)):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in (*targets, *kept)}))
            raise ModelError(
                f"the model has no linear layer `{skip}` to leave dense; its linear layers are {known}",
                field="quantization.skip_modules",
            )
    if not targets:
        raise ModelError("the model has no linear layer to quantise", field="quantization")
    return targets, kept


def _is(name: str, asked: str) -> bool:
    """Full names, or their last part."""
    return name == asked or name.endswith("." + asked)


# --- the files -------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
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


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """One after the other; each is good until the next is asked for."""
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 -- not a dict
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(f"{file.name} is truncated or damaged: {error}", field="model") from error


def _wanted(model: Any) -> set[str]:
    """Names of everything that the files must give values to."""
    return {name for name, _ in model.named_parameters()} | set(_persistent_buffers(model))


def _fill(
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
    import re

    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _finish(model: Any, folder: Path) -> None:
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError(f"{left[0]} got no values from the files", field="model")
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # PEFT and transformers would look for bitsandbytes' modules
    model.eval()


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors as they go to a file, one name for each memory (the head of a tied model is left out)."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place in seen and tensor.numel():
            continue
        seen.add(place)
        state[name] = tensor.contiguous()
    return state
