"""A folder of quantised weights → a folder of the same model in 16 bits, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import ModelError
from core.train.base.shards import INDEX_FILE, write_shards
from core.train.hub.download import is_small_file
from core.train.hub.model_files import read_json, weight_files
from core.train.hub.unpack import codes, compressed, formats
from core.train.hub.unpack.packing import Packing

VERSION = 1
"""Part of the cache key: raise it when the same files would give another folder."""
BESIDE = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    "mxfp4": ("blocks", "scales"),
    "compressed_words": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "compressed_mxfp4": ("weight_packed", "weight_scale"),
    "compressed": ("weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"),
    "hqq": ("W_q", "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype",
            "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
            "stores_quant_config", "channel_wise", "optimize", "round_zero"),
    "aqlm": ("codes", "codebooks", "scales"),
    "int8": ("SCB", "weight_format"),
    "four_bits": ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__fp4",
                  "quant_state.bitsandbytes__nf4"),
}  # fmt: skip
"""Last names of the tensors of a packed weight, beside `weight`."""


def write_unpacked(source: Path, packing: Packing, folder: Path, between: Callable[[], None] = lambda: None) -> str:
    """Write `folder` with everything of `source`, the weights unpacked; the dtype of unpacked weights. `between` runs
    after every tensor. ModelError where the files are not what config.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config")
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = {"float16": torch.float16, "float32": torch.float32}.get(named, torch.bfloat16)
    names = [path.name for path in source.iterdir() if path.is_file()]
    for name in sorted(names):
        if is_small_file(name) and name not in ("config.json", INDEX_FILE):
            shutil.copyfile(source / name, folder / name)
    write_shards(_unpacked(source, packing, dtype), folder, between)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return str(dtype).removeprefix("torch.")


def _unpacked(source: Path, packing: Packing, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    with ExitStack() as stack:
        index = read_json(source / INDEX_FILE, field="model") if (source / INDEX_FILE).is_file() else None
        shards = weight_files([path.name for path in source.iterdir()], index, field="model")
        files = [stack.enter_context(safe_open(source / shard, framework="pt")) for shard in shards]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 -- not a dict
        packed: dict[str, dict[str, str]] = {}
        for name in where:
            if (found := _split(name, packing)) is not None:
                packed.setdefault(found[0], {})[found[1]] = name
        # What has such a piece beside it (a scale), and not every tensor of that name, is a packed weight.
        for module, names in packed.items():
            if packing.format in ("fp8", "int8", "four_bits", "compressed") and f"{module}.weight" in where:
                names["weight"] = f"{module}.weight"
        if packing.format in ("hqq", "aqlm"):  # whose names are those of ordinary tensors, too
            main = packing.marks[0].removeprefix(".")
            packed = {module: names for module, names in packed.items() if main in names}
        pieces = {name for names in packed.values() for name in names.values()}
        for name, file in where.items():
            if name not in pieces:
                yield name, file.get_tensor(name)
        for module, names in packed.items():
            tensors = {last: where[name].get_tensor(name) for last, name in names.items()}
            weight = _weight(tensors, packing, module, dtype)
            if not bool(torch.isfinite(weight).all()):
                raise ModelError(f"{module} holds NaN or infinite weights once unpacked", field="model")
            yield module if packing.format == "mxfp4" else f"{module}.weight", weight


def _split(name: str, packing: Packing) -> tuple[str, str] | None:
    """(module, last name) of a tensor that only packed weights have."""
    if packing.format == "four_bits":
        module, found, last = name.partition(".weight.")
        return (module, last) if found and last in BESIDE["four_bits"] else None
    between = "_" if packing.format == "mxfp4" else "."
    for last in BESIDE[packing.format]:
        if name.endswith(between + last):
            return name[: -len(last) - 1], last
    return None


def _weight(pieces: dict[str, Tensor], packing: Packing, where: str, dtype: torch.dtype) -> Tensor:
    match packing.format:
        case "gptq":
            return formats.gptq(pieces, packing, where)
        case "awq":
            return formats.awq(pieces, packing, where)
        case "fp8":
            return formats.fp8(pieces, packing, where, dtype)
        case "mxfp4":
            return formats.mxfp4(pieces, where)
        case "int8":
            return formats.int8(pieces, where, dtype)
        case "compressed_words":
            return compressed.packed(pieces, packing, where, dtype)
        case "compressed_mxfp4":
            return compressed.mxfp4(pieces, where, dtype)
        case "compressed":
            return compressed.plain(pieces, packing, where, dtype)
        case "hqq":
            return codes.hqq(pieces, where, dtype)
        case "aqlm":
            return codes.aqlm(pieces, packing, where, dtype)
        case "four_bits":
            return formats.four_bits(pieces, where, dtype)
        case _ as never:
            assert_never(never)
