"""What the headers of a model's files say, without torch: config.json, the index, and safetensors headers.

The safetensors format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, little
endian, then that much JSON, then the data.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from core.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
MAX_JSON_BYTES = 64 << 20
"""Largest size of config.json and of the index, bytes: about ten times that of the largest models."""
MAX_DIMENSIONS = 8
_NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
"""Errors that are about the path, and not about the disk."""
BUFFERS = re.compile(r"(\.attn\.masked_bias|\.rotary_emb\.inv_freq|^(transformer\.)?h\.\d+\.attn\.bias)$")
"""Constants that old checkpoints carry and no model counts as parameters."""
OUTPUT_HEAD = "lm_head.weight"
NF4_STATE = ".quant_state.bitsandbytes__nf4"
"""The tensor that says, behind a weight's name, that it is packed."""
SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def weight_files(names: Collection[str], index: dict[str, Any] | None, *, field: str) -> list[str]:
    """The safetensors files a loader would read, of the file `names` at the top of a folder or repository."""
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise unreadable(f"{INDEX_FILE} has no `weight_map`", field)
        shards = sorted({str(shard) for shard in weight_map.values()})
        for shard in shards:
            if not SHARD_NAME.fullmatch(shard):
                raise unreadable(f"{INDEX_FILE} names {shard!r}, which is not a plain safetensors file name", field)
            if shard not in names:
                raise unreadable(f"{INDEX_FILE} names {shard}, which is missing", field)
        return shards
    if WEIGHTS_FILE in names:
        return [WEIGHTS_FILE]
    if "adapter_config.json" in names:
        raise ModelError(
            "this is an adapter, not a model; give the base model it was trained on",
            field=field,
            code="model_unsupported",
        )
    if pickled := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise ModelError(
            f"the weights are only there in a format that can run code when it is read ({pickled[0]}); eft reads "
            "safetensors: use a revision that has them, or load the model where you trust it and save it again with "
            "save_pretrained()",
            field=field,
            code="model_pickle",
        )
    raise unreadable(f"neither {WEIGHTS_FILE} nor {INDEX_FILE} is there", field)


def read_header(path: Path, *, field: str) -> dict[str, Tensor]:
    """The tensors of one safetensors file. The offsets must cover the data exactly, without gap or overlap."""
    return {name: tensor for name, (tensor, _) in read_places(path, field=field).items()}


def read_places(path: Path, *, field: str) -> dict[str, tuple[Tensor, int]]:
    """The same with the byte of the file at which each tensor begins."""
    with open_regular(path, field=field) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise unreadable(f"{path.name} is not a safetensors file, or is cut short", field)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: Tensor(entry["dtype"], sizes(entry["shape"])) for name, entry in header.items()}
        spans = sorted((*_span(entry["data_offsets"]), name) for name, entry in header.items())
        position = 0
        for begin, end, name in spans:
            if begin != position or (end - begin) * 8 != tensors[name].numel * DTYPE_BITS[tensors[name].dtype]:
                raise ValueError(f"the offsets of {name} do not fit its shape")
            position = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(f"{path.name} has a broken safetensors header ({error})", field) from error
    if 8 + length + position != size:
        raise unreadable(f"{path.name} is {size} bytes long, its header says {8 + length + position}", field)
    return {name: (tensors[name], 8 + length + begin) for begin, _, name in spans}


def sizes(shape: Any) -> tuple[int, ...]:
    """ValueError for what is no shape."""
    found = tuple(shape)
    if len(found) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in found):
        raise ValueError("a shape is a short list of whole numbers that are not negative")
    return found


def _span(offsets: Any) -> tuple[int, int]:
    begin, end = sizes(offsets)
    return begin, end


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with NF4 weights as what they stand for, and without their scales."""
    packed = {name.removesuffix(NF4_STATE) for name in tensors if name.endswith(NF4_STATE)}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight = name[: name.find(".weight.") + 7] if ".weight." in name else name
        if name in packed:
            found[name] = Tensor("NF4", (2 * tensor.numel,))
        elif weight not in packed:
            found[name] = tensor
    return found


def read_json(path: Path, *, field: str) -> dict[str, Any]:
    try:
        with open_regular(path, field=field) as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise unreadable(f"{path.name} is larger than {MAX_JSON_BYTES >> 20} MiB", field)
        value = json.loads(content)
    except FileNotFoundError:
        raise unreadable(f"{path.name} is missing; the folder must be in Hugging Face format", field) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(f"{path.name} is not valid JSON ({error})", field) from error
    if not isinstance(value, dict):
        raise unreadable(f"{path.name} is not a JSON object", field)
    return value


@contextmanager
def open_regular(path: Path, *, field: str) -> Iterator[IO[bytes]]:
    """For reading. ModelError for a pipe or a device, which would be waited for for ever, and for what is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise unreadable(f"{path.name} cannot be read: {error.strerror}", field) from error
        raise
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not regular:
        os.close(descriptor)
        raise unreadable(f"{path.name} is not a regular file", field)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def ties_head(config: dict[str, Any]) -> bool:
    """Whether the output head is the input embedding. Left out and yet stored means that it is a matrix of its own."""
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return bool(config.get("tie_word_embeddings", inner or False))


def unreadable(message: str, field: str) -> ModelError:
    return ModelError(message, field=field, code="model_unreadable")
