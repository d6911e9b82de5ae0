"""A model folder in Hugging Face format, checked and measured without torch.

What is read: config.json and the headers of the safetensors files
(https://huggingface.co/docs/safetensors, "Format"): eight bytes little-endian length, that much JSON, then the data.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import struct
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
BUFFERS = re.compile(r"(\.attn\.masked_bias|\.rotary_emb\.inv_freq|^(transformer\.)?h\.\d+\.attn\.bias)$")
"""Constants that old checkpoints carry and no model counts as parameters."""
OUTPUT_HEAD = "lm_head.weight"
NF4_STATE = ".quant_state.bitsandbytes__nf4"
"""The tensor that says, behind a weight's name, that it is packed."""
SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Summary:
    """What may be said of a model without loading it."""

    parameters: int
    """As the meta device counts them: tied weights once, constants not at all."""
    bytes: int
    """Of the weight files."""
    dtypes: dict[str, int]
    """Parameters per stored dtype, in safetensors' names (`F32`, `BF16`, …), or `NF4`."""
    model_type: str
    architecture: str
    """The transformers class that will be built."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def inspect(folder: Path, *, field: str) -> Summary:
    """Check that `folder` holds a causal language model we can load safely, and measure it.

    Raises ModelError (naming `field`) when something is missing, broken, needs code of its own, or is pickled.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    config = read_json(folder / "config.json", field=field)
    architecture = check_config(config, field=field)
    index = read_json(folder / INDEX_FILE, field=field) if INDEX_FILE in names else None
    shards = weight_files(names, index, field=field)
    check_tokenizer(names, field=field)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in read_header(folder / shard, field=field).items():
            if name in tensors:
                raise unreadable(f"tensor {name} is in more than one of the weight files", field)
            tensors[name] = tensor
    if index is not None and (missing := set(index["weight_map"]) - set(tensors)):
        raise unreadable(f"{INDEX_FILE} names {len(missing)} tensors that no file holds, e.g. {min(missing)}", field)
    counted = {name: tensor for name, tensor in unpacked(tensors).items() if not BUFFERS.search(name)}
    if _ties_head(config) and len(counted) > 1:
        counted.pop(OUTPUT_HEAD, None)
    dtypes: dict[str, int] = {}
    for tensor in counted.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel
    return Summary(
        parameters=sum(dtypes.values()),
        bytes=sum((folder / shard).stat().st_size for shard in shards),
        dtypes=dtypes,
        model_type=str(config["model_type"]),
        architecture=architecture,
    )


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


def check_config(config: dict[str, Any], *, field: str) -> str:
    """The transformers class for this config.json; ModelError when there is none, or when the weights are packed in a
    way that cannot be trained over."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise unreadable("config.json has no `model_type`; it must be a transformers model", field)
    architecture = causal_lm_classes().get(model_type)
    if architecture is None and "auto_map" in config:
        raise ModelError(
            f"this model (`{model_type}`) needs Python code from its own repository, and eft runs no code of models; "
            "choose a model that transformers has a class for",
            field=field,
            code="model_needs_code",
        )
    if architecture is None:
        raise ModelError(
            f"transformers has no causal language model for `model_type: {model_type}`; "
            "check that this is a text-generation model, not an encoder, an embedding model or an adapter",
            field=field,
            code="model_unsupported",
        )
    if config.get("quantization_config") is not None:
        check_packing(config["quantization_config"], field=field)
    return architecture


def check_packing(about: Any, *, field: str) -> None:
    """NF4 as bitsandbytes writes it can be trained over; ModelError, by its name, for every other packing."""
    about = about if isinstance(about, dict) else {}
    method = str(about.get("quant_method", "a method that config.json does not name"))
    match method:
        case "bitsandbytes" if about.get("load_in_8bit"):
            method = "LLM.int8 of bitsandbytes"
        case "bitsandbytes" if about.get("bnb_4bit_quant_type") != "nf4":
            method = "FP4 of bitsandbytes"
        case "bitsandbytes" if about.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            method = f"NF4 of bitsandbytes, stored as {about['bnb_4bit_quant_storage']}"
        case "bitsandbytes":
            return
    raise ModelError(
        f"the weights are already quantised ({method}), and only NF4 as bitsandbytes stores it in bytes is trained "
        "over; give the 16-bit model they were made from, with `method: qlora` if memory is short",
        field=field,
        code="model_quantized",
    )


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


def check_tokenizer(names: Collection[str], *, field: str) -> None:
    if not {"tokenizer.json", "tokenizer.model"} & set(names) and not {"vocab.json", "merges.txt"} <= set(names):
        raise unreadable("no tokenizer is there (tokenizer.json, tokenizer.model, or vocab.json and merges.txt)", field)


def read_header(path: Path, *, field: str) -> dict[str, Tensor]:
    """The tensors of one safetensors file. The offsets must cover the data exactly, without gap or overlap."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise unreadable(f"{path.name} is not a safetensors file, or is cut short", field)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        position = 0
        for begin, end, name in spans:
            if begin != position or (end - begin) * 8 != tensors[name].numel * DTYPE_BITS[tensors[name].dtype]:
                raise ValueError(f"the offsets of {name} do not fit its shape")
            position = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(f"{path.name} has a broken safetensors header ({error})", field) from error
    if 8 + length + position != size:
        raise unreadable(f"{path.name} is {size} bytes long, its header says {8 + length + position}", field)
    return tensors


def read_json(path: Path, *, field: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise unreadable(f"{path.name} is missing; the folder must be in Hugging Face format", field) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(f"{path.name} is not valid JSON ({error})", field) from error
    if not isinstance(value, dict):
        raise unreadable(f"{path.name} is not a JSON object", field)
    return value


@cache
def causal_lm_classes() -> dict[str, str]:
    """`model_type` → class, from the table transformers itself uses.

    The table is read as text, since importing it imports torch (1.5 s); a test holds it equal to the imported one.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ImportError("transformers is not installed; install the `train` extra on workers")
    source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")], value=ast.Call(args=[table])):
                return dict(ast.literal_eval(table))
    raise ImportError("this version of transformers keeps its causal language models elsewhere")


def unreadable(message: str, field: str) -> ModelError:
    return ModelError(message, field=field, code="model_unreadable")


def _ties_head(config: dict[str, Any]) -> bool:
    """Whether the output head is the input embedding. Left out and yet stored means that it is a matrix of its own."""
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return bool(config.get("tie_word_embeddings", inner or False))
