"""The image of a model for streaming from disk: each block's streamed tensors as one run of bytes, ready for a slot.

An entry of the cache of packed weights (core/train/quant/cache.py): `block-00000.safetensors` and so on, each one
tensor `block` of bytes; `rest.safetensors` with everything that stays on the device; `image.json`, which says what is
where. It is made and read block by block, so that a model may be larger than the memory of the box.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from core.base.files import sha256
from core.errors import ModelError, NoSpace
from core.train.memory.streaming.block_source import FileBlocks
from core.train.memory.streaming.blocks import FIELD, PACKED_PARTS, StreamedBlock, find_blocks, lay_out, lay_out_block
from core.train.memory.streaming.mapped import MappedTensors
from core.train.quant import cache
from core.train.quant.fill import fill_model, names_wanted, weight_files
from core.train.quant.int8 import Int8Weight
from core.train.quant.layout import NF4Weight
from core.train.quant.linear import PackedWeight, QuantLinear
from core.train.quant.model import QuantReport, report_of
from core.train.quant.skeleton import finish, skeleton
from core.train.quant.targets import QuantOptions, already_quantised, choose_targets

VERSION = 1
"""Version of the image's layout."""
PAGE = 4096
"""Alignment of a block's bytes in their file."""
INDEX, REST = "image.json", "rest.safetensors"
Told = Callable[[str], None]


def load_from_disk(
    folder: Path,
    dtype: torch.dtype,
    options: QuantOptions | None,
    cache_dir: Path,
    *,
    between: Told = lambda doing: None,
    digest: Callable[[Path], str] = sha256,
) -> tuple[nn.Module, QuantReport | None, list[StreamedBlock], FileBlocks]:
    """A model whose blocks are mapped from their image below `cache_dir`, as `core.train.quant.model.load_quantized`
    would load it; `options` None: nothing is packed. An image that is not there is made first. The blocks are laid out
    as they lie in the files. ModelError when the model cannot be read or has no blocks, NoSpace when its image does not
    fit on the disk."""
    started = time.perf_counter()
    files = weight_files(folder)

    def hashed(path: Path) -> str:
        between("loading")
        return digest(path)

    key = _key(folder, files, options, dtype, hashed)
    found, fault = cache.lookup(cache_dir, key)
    source = "cache"
    if found is None:
        source = "quantised"
        cache.publish(cache_dir, key, lambda aside: _make(aside, folder, files, dtype, options, between))
        found, fault_now = cache.lookup(cache_dir, key)
        if found is None:
            raise ModelError(f"the image of the model's blocks is gone again: {fault_now or cache_dir}", field=FIELD)
    model, blocks, about = _read(found, folder, dtype, between)
    report = None
    if options is not None:
        report = report_of(model, options, dtype, about["kept"], source)
        report = replace(report, cache_fault=fault, seconds=time.perf_counter() - started)
    return model, report, blocks, FileBlocks([_range(found, number, block) for number, block in enumerate(blocks)])


def _key(
    folder: Path, files: Sequence[Path], options: QuantOptions | None, dtype: torch.dtype, digest: Callable[[Path], str]
) -> str:
    about = {
        "image": VERSION,
        "version": cache.VERSION,
        "options": None if options is None else asdict(options),
        "dtype": str(dtype),
        "files": {file.name: digest(file) for file in [folder / "config.json", *files]},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# --- made ------------------------------------------------------------------------------------------------


def _make(
    aside: Path, folder: Path, files: Sequence[Path], dtype: torch.dtype, options: QuantOptions | None, between: Told
) -> None:
    model, config = skeleton(folder, dtype)
    already = options is not None and already_quantised(config, options)
    targets, kept = choose_targets(model, options) if options is not None else (set(), {})
    lay_out(model, trained=False)  # refuses shared blocks before anything is written
    tensors, wanted = MappedTensors(files), names_wanted(model)
    doing = "loading" if already or options is None else "quantizing"
    how = None if already else options
    aside.mkdir(parents=True)

    def fill(mine: Callable[[str], bool]) -> None:
        names = [name for name in tensors.names() if mine(name)]
        part = {name for name in wanted if mine(name)}
        fill_model(model, tensors.items(names), part, targets, kept, dtype, how, lambda: between(doing))

    found = find_blocks(model)
    of_blocks = tuple(f"{name}." for name, _ in found)
    fill(lambda name: not name.startswith(of_blocks))
    rest: dict[str, Tensor] = {}
    index: dict[str, Any] = {"version": VERSION, "kept": kept, "quantized": {}, "blocks": []}
    _note(model, "", index, rest, without=tuple(module for _, module in found))
    flat = torch.empty(0, dtype=torch.uint8)  # one for all: freed and made anew, it would leave holes of its size
    for number, (name, module) in enumerate(found):
        fill(lambda each, name=name: each.startswith(f"{name}."))  # type: ignore[misc]
        block = lay_out_block(name, module, trained=False)
        if number == 0:
            check_room(aside, block.nbytes * len(found))
        if flat.numel() < block.nbytes:
            flat = torch.zeros(block.nbytes, dtype=torch.uint8)
        for view, place in zip(block.views(flat), block.places, strict=True):
            view.copy_(place.tensor.detach())
        _write(_file(aside, number), flat[: block.nbytes])
        index["blocks"].append(
            [[part.name, str(part.dtype).removeprefix("torch."), list(part.shape), part.offset] for part in block.parts]
        )
        streamed = {f"{name}.{part.name}" for part in block.parts}
        _note(module, f"{name}.", index, rest, streamed=streamed)
        block.put([torch.empty(0, dtype=part.dtype) for part in block.parts])
    save_file(rest, aside / REST)
    (aside / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _write(path: Path, flat: Tensor) -> None:
    """A safetensors file with the one tensor `block`. The library would copy it first."""
    about = {"block": {"dtype": "U8", "shape": [flat.numel()], "data_offsets": [0, flat.numel()]}}
    header = json.dumps(about).encode().ljust(PAGE - 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(memoryview(flat.numpy()))  # type: ignore[arg-type]


def _note(
    root: nn.Module,
    prefix: str,
    index: dict[str, Any],
    rest: dict[str, Tensor],
    *,
    streamed: Collection[str] = (),
    without: tuple[nn.Module, ...] = (),
) -> None:
    """Into `rest` what stays on the device, into `index` how packed layers are made up again. `without`: modules that
    come later."""
    later = {id(each) for module in without for each in module.modules()}
    seen: set[int] = set()
    for local, module in root.named_modules():
        if id(module) in later:
            continue
        path = f"{prefix}{local}".rstrip(".")
        held: dict[str, Tensor | None] = {**module._parameters}
        if isinstance(module, QuantLinear):
            index["quantized"][path] = {
                "format": module.format,
                "block": module.block,
                "shape": [module.out_features, module.in_features],
                "dtype": str(module.quantized_dtype).removeprefix("torch."),
            }
            held |= {name: module._buffers[name] for name in (*PACKED_PARTS, "nested_map", "offset")}
        else:
            held |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in held.items():
            full = f"{path}.{name}" if path else name
            # Tied parameters once; what is meta is tied to something that has its values already.
            if tensor is None or full in streamed or tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
            rest[full] = tensor.detach().clone()


def check_room(aside: Path, needs: int) -> None:
    free = shutil.disk_usage(aside).free
    if free < needs:
        raise NoSpace(
            f"the image of the model's blocks takes {(needs >> 20) + 1} MiB, {free >> 20} MiB are free: make room "
            "below the data root, or set `memory.stream` to `host`",
            needs_bytes=needs,
        )


# --- read ------------------------------------------------------------------------------------------------


def _read(image: Path, folder: Path, dtype: torch.dtype, between: Told) -> tuple[nn.Module, list[StreamedBlock], Any]:
    index = json.loads((image / INDEX).read_text(encoding="utf-8"))
    model, _ = skeleton(folder, dtype)
    rest = MappedTensors([image / REST])
    tensors = {name: tensor.clone() for name, tensor in rest.items(rest.names())}
    names = [name for name, _ in find_blocks(model)]
    for number, (name, parts) in enumerate(zip(names, index["blocks"], strict=True)):
        between("loading")
        whole = MappedTensors([_file(image, number)])["block"]
        for local, kind, shape, offset in parts:
            piece_dtype = getattr(torch, kind)
            count = torch.Size(shape).numel() * piece_dtype.itemsize
            tensors[f"{name}.{local}"] = whole[offset : offset + count].view(piece_dtype).view(shape)
    maps: dict[bytes, Tensor] = {}
    for path, about in index["quantized"].items():
        parent, _, local = path.rpartition(".")
        pieces = {name: tensors.pop(f"{path}.{name}", None) for name in (*PACKED_PARTS, "nested_map", "offset", "bias")}
        if (table := pieces["nested_map"]) is not None:  # one for all layers, as where it was made
            pieces["nested_map"] = maps.setdefault(table.numpy().tobytes(), table)
        setattr(model.get_submodule(parent), local, QuantLinear(_weight(about, pieces), pieces["bias"]))
    for name, tensor in tensors.items():
        parent, _, local = name.rpartition(".")
        module = model.get_submodule(parent)
        if local in module._parameters:
            module._parameters[local] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        else:
            module._buffers[local] = tensor
    model.tie_weights()
    finish(model, folder)
    blocks = lay_out(model, trained=False)
    here = [[[p.name, str(p.dtype).removeprefix("torch."), list(p.shape), p.offset] for p in b.parts] for b in blocks]
    if here != index["blocks"]:
        raise ModelError(f"{image} is the image of another model; delete it, and it is made anew", field=FIELD)
    return model, blocks, index


def _weight(about: dict[str, Any], pieces: dict[str, Tensor | None]) -> PackedWeight:
    packed, absmax = pieces["packed"], pieces["absmax"]
    assert packed is not None and absmax is not None
    (n, k), dtype = about["shape"], getattr(torch, about["dtype"])
    if about["format"] == "int8":
        return Int8Weight(packed, absmax, (n, k), dtype, about["block"])
    nested = pieces["nested_absmax"], pieces["nested_map"], pieces["offset"]
    return NF4Weight(packed, absmax, *nested, (n, k), dtype, about["block"])


def _file(image: Path, number: int) -> Path:
    return image / f"block-{number:05d}.safetensors"


def _range(image: Path, number: int, block: StreamedBlock) -> tuple[Path, int, int]:
    file = _file(image, number)
    return file, MappedTensors([file]).where("block").start, block.nbytes
