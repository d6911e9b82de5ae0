"""One GGUF file → a Hugging Face folder (weights, configuration, tokenizer with its chat template).

transformers reads the file (https://huggingface.co/docs/transformers/gguf). Two things are ours:

* dtype. Dequantised values are kept exactly: the smallest of bf16, fp16 and fp32 that holds every value of the file
  unchanged (fp32 for Q4_1: rounding to bf16 would move 74 % of SmolLM2-135M's values, by 0.13 % in norm).
* the split of text before byte-level BPE, which GGUF stores only as a name (`tokenizer.ggml.pre`). transformers 5.23
  falls back to GPT-2's in silence for names it has no row for, SmolLM2's among them; runs of spaces or newlines before
  a digit then become other tokens than those the model was trained on. A name that neither of us knows is refused.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import EftError, ModelError
from core.plan.models.config import MOST, MOST_EXPERTS, MOST_LAYERS
from core.train.base.disk import disk_full
from core.train.hub.gguf_once import read_once
from core.train.hub.model_files import unreadable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONVERTER = 1
"""Part of the cache key: raise it when the same file would give another folder."""

DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Every digit by itself, the rest as GPT-2 splits it (llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe)."""
AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"}
"""GPT-2's own split (same place), which is also transformers' fallback."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
MAX_DIMENSIONS = 8


BLOCK = re.compile(r"blk\.(\d{1,9})\.")
SIZES = dict.fromkeys(
    (
        "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
        "attention.key_length", "attention.value_length", "rope.dimension_count",
    ),
    MOST,
) | {"block_count": MOST_LAYERS, "expert_count": MOST_EXPERTS, "context_length": 1 << 40}  # fmt: skip
"""Metadata by which transformers builds a model, and the most of each."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

    metadata: dict[str, Any]
    """Scalars and strings; arrays are left out."""
    tensor_types: dict[str, int]
    """Tensors per GGML type, e.g. {"Q4_1": 210, "F32": 61}."""


def check_magic(path: Path, *, field: str) -> None:
    """Before anybody hashes something large that is no GGUF file at all."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise unreadable(f"{path.name} is not a GGUF file", field)


def read_header(path: Path, *, field: str) -> Header:
    """Torch-free; ModelError when this is no GGUF file that transformers could read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise unreadable(f"{path.name} is not a GGUF file", field)
            version, tensor_count, pair_count = struct.unpack_from("<IQQ", data, 4)
            if version not in (2, 3):
                raise unreadable(f"{path.name} is GGUF version {version}; versions 2 and 3 can be read", field)
            metadata: dict[str, Any] = {}
            position = 24
            for _ in range(pair_count):
                key, position = _string(data, position)
                (kind,) = struct.unpack_from("<I", data, position)
                value, position = _value(data, position + 4, kind)
                if value is not None:
                    metadata[key] = value
            types: Counter[str] = Counter()
            blocks: set[str] = set()
            need = 0
            for _ in range(tensor_count):
                name, position = _string(data, position)
                if (found := BLOCK.match(name)) is not None:
                    blocks.add(found[1])
                (dimensions,) = struct.unpack_from("<I", data, position)
                if dimensions > MAX_DIMENSIONS:
                    raise ValueError(f"a tensor of {dimensions} dimensions")
                shape = struct.unpack_from(f"<{dimensions}Q", data, position + 4)
                position += 4 + 8 * dimensions
                kind, offset = struct.unpack_from("<IQ", data, position)
                position += 12
                types[GGMLQuantizationType(kind).name] += 1
                values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
                need = max(need, offset + math.prod(shape) // values * size)
            alignment = metadata.get("general.alignment", ALIGNMENT)
            need += -(-position // alignment) * alignment
            if need > len(data):
                raise unreadable(f"{path.name} is cut short: {len(data)} bytes of {need}", field)
            _check_numbers(path.name, metadata, len(blocks), field)
    except (struct.error, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise unreadable(f"{path.name} has a broken GGUF header ({error})", field) from error
    return Header(metadata, dict(types))


def _check_numbers(file: str, metadata: dict[str, Any], blocks: int, field: str) -> None:
    """ModelError for sizes that no model has, and for more blocks than the file holds; each of them would be built."""
    architecture = metadata.get("general.architecture")
    for name, most in SIZES.items():
        value = metadata.get(f"{architecture}.{name}")
        most = blocks if name == "block_count" else most
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            what = f"should lie between 0 and {most}" + (", the blocks that it holds" if name == "block_count" else "")
            raise unreadable(f"{file}: `{architecture}.{name}` is {value!r}, and {what}", field)


def convert(path: Path, folder: Path, *, field: str) -> dict[str, Any]:
    """Write `folder`; returns what to record: {"dtype", "tensor_types", "transformers"}. Imports torch.

    Uses a folder "source" beside `folder`, where nothing but the file itself can be found.

    ModelError when transformers cannot read this architecture, or nobody knows how its tokenizer splits text.
    """
    import transformers
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    from core.train.base.out_of_memory import is_out_of_memory

    header = read_header(path, field=field)
    architecture = header.metadata.get("general.architecture")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # A config.json or tokenizer_config.json that happens to lie beside the file would be taken into account.
    alone = folder.parent / "source"
    alone.mkdir(parents=True, exist_ok=True)
    link = alone / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())
    try:
        with read_once():
            tokenizer = _tokenizer(link, header, field)
            model: Any = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=link.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
            )
    except EftError:
        raise
    except Exception as error:  # whatever transformers makes of it: the file is somebody else's
        if is_out_of_memory(error) or disk_full(error):
            raise
        raise ModelError(
            f"transformers cannot convert {path.name} (architecture {architecture}): {type(error).__name__}: {error}; "
            "give the model in safetensors instead",
            field=field,
            code="model_unsupported",
        ) from error
    dtype = _smallest_exact_dtype(model)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_types": header.tensor_types,
        "transformers": transformers.__version__,
    }


def _tokenizer(path: Path, header: Header, field: str) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        name = header.metadata.get("tokenizer.ggml.pre")
        if name in DIGITS_THEN_GPT2:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif name not in AS_GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
            raise ModelError(
                f"the file names a text split that is not known here (tokenizer.ggml.pre = {name!r}), so its "
                "tokens would not be those the model was trained on; give the model in safetensors instead",
                field=field,
                code="model_unsupported",
            )
    context = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        tokenizer.model_max_length = context
    return tokenizer


def _smallest_exact_dtype(model: PreTrainedModel) -> torch.dtype:
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(value, value.to(dtype).to(value.dtype)) for value in model.state_dict().values()):
            return dtype
    return torch.float32


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    position += 8
    if position + length > len(data):
        raise ValueError("a string reaches past the end of the file")
    return data[position : position + length].decode(), position + length


def _value(data: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    """(the value, or None for an array; the position behind it)"""
    if kind in SCALARS:
        return struct.unpack_from(SCALARS[kind], data, position)[0], position + struct.calcsize(SCALARS[kind])
    if kind == STRING:
        return _string(data, position)
    if kind != ARRAY:
        raise ValueError(f"unknown metadata type {kind}")
    element, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if element in SCALARS:
        return None, position + count * struct.calcsize(SCALARS[element])
    for _ in range(count):
        _, position = _value(data, position, element)
        if position > len(data):
            raise ValueError("an array reaches past the end of the file")
    return None, position
