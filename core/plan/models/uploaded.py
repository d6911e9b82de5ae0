"""A model or an adapter that was made elsewhere, checked before the registry takes it. No torch, and nothing is run.

A folder holds either a model in Hugging Face format or an adapter as PEFT saves it. Weights are safetensors; each value
is looked at, since NaN in one of them makes every loss NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from core.errors import ModelError
from core.plan.models.config import check_numbers
from core.plan.models.headers import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    Tensor,
    open_regular,
    read_header,
    read_json,
    read_places,
    unreadable,
    weight_files,
)
from core.plan.models.shape import hold_against_files
from core.spec.axes.method import Full, LoRA

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
NAMES = (
    *("config.json", "generation_config.json", INDEX_FILE, ADAPTER_CONFIG, "README.md", "chat_template.jinja"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "LICENSE"),
    *TOKENIZERS,
)
"""Files of a folder that are kept, beside its safetensors."""
FIELD = "file"
CHUNK = 1 << 20
PAIR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
OTHERS = re.compile(r"base_model\.model\..+\.(lora_magnitude_vector(\.weight)?|lora_embedding_[AB]|weight|bias)")
CHANGES: dict[str, Any] = {
    "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layer_replication": None,
    "lora_bias": False, "trainable_token_indices": None, "target_parameters": None, "use_qalora": False,
    "megatron_config": None, "arrow_config": None, "alora_invocation_tokens": None, "exclude_modules": None,
}  # fmt: skip
"""Entries of adapter_config.json that change what an adapter computes, with the one value that is taken."""
_ABOVE: dict[str, tuple[int, bytes, bytes | None]] = {
    "BF16": (2, b"[\x7f\xff]", b"[\x80-\xff]"),
    "F16": (2, b"[\x7c-\x7f\xfc-\xff]", None),
    "F32": (4, b"[\x7f\xff]", b"[\x80-\xff]"),
    "F64": (8, b"[\x7f\xff]", b"[\xf0-\xff]"),
    "F8_E4M3": (1, b"[\x7f\xff]", None),
    "F8_E5M2": (1, b"[\x7c-\x7f\xfc-\xff]", None),
}
"""Bytes of a number, and what its last and its last but one byte are in NaN and in infinities alone."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What a folder holds."""

    kind: Literal["adapter", "model"]
    method: Full | LoRA
    """Method whose result it is."""
    base: str | None = None
    """Base model that an adapter names."""
    revision: str | None = None
    """Revision of that model, as the adapter names it."""


def check_name(name: str) -> None:
    """ModelError for a file that is no part of a model, or that could run code."""
    if name in NAMES or name.endswith(".safetensors"):
        return
    if name.endswith(PICKLE_SUFFIXES):
        words = (
            f"`{name}` is a format that can run code when it is read; save the model with save_pretrained(), which "
            "writes safetensors, and upload that"
        )
        raise ModelError(words, field=FIELD, code="model_pickle")
    words = f"`{name}` is not a file of a model: its safetensors, and {', '.join(NAMES)}, are taken"
    raise ModelError(words, field=FIELD, code="model_unsupported")


def check_uploaded(folder: Path, left: Callable[[], bool] = lambda: False) -> Uploaded:
    """Check a folder whose names have been checked. ModelError, which names the file and the tensor. It stops
    early where `left` says that nobody waits for it."""
    names = sorted(path.name for path in folder.iterdir())
    if ADAPTER_CONFIG in names and "config.json" in names:
        words = (
            "the folder holds a model (config.json) and an adapter (adapter_config.json): upload them one after the "
            "other, the adapter with the model as its base"
        )
        raise ModelError(words, field=FIELD, code="model_unsupported")
    if ADAPTER_CONFIG in names:
        found = _adapter(folder, names)
    elif "config.json" in names:
        found = _model(folder, names)
    else:
        raise unreadable("neither config.json (a model) nor adapter_config.json (an adapter) is there", FIELD)
    for name in names:
        if name.endswith(".safetensors"):
            require_finite(folder / name, left)
    return found


def _model(folder: Path, names: Collection[str]) -> Uploaded:
    config = read_json(folder / "config.json", field=FIELD)
    check_numbers(config, field=FIELD)
    if not isinstance(config.get("model_type"), str):
        raise unreadable("config.json has no `model_type`; it must be a transformers model", FIELD)
    if not set(TOKENIZERS) & set(names) and not {"vocab.json", "merges.txt"} <= set(names):
        raise unreadable("no tokenizer is there (tokenizer.json, tokenizer.model, or vocab.json and merges.txt)", FIELD)
    index = read_json(folder / INDEX_FILE, field=FIELD) if INDEX_FILE in names else None
    shards = weight_files(names, index, field=FIELD)
    if lost := sorted(set(shards) - set(names)):
        raise unreadable(f"{INDEX_FILE} names {lost[0]}, which is not there", FIELD)
    if extra := sorted(name for name in names if name.endswith(".safetensors") and name not in shards):
        raise unreadable(f"{extra[0]} is not a weight file of this model: remove it", FIELD)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in read_header(folder / shard, field=FIELD).items():
            if name in tensors:
                raise unreadable(f"tensor {name} is in more than one of the weight files", FIELD)
            tensors[name] = tensor
    if index is not None and (missing := set(index["weight_map"]) - set(tensors)):
        raise unreadable(f"{INDEX_FILE} names {len(missing)} tensors that no file holds, e.g. {min(missing)}", FIELD)
    if config.get("quantization_config") is None:
        hold_against_files(config, tensors, field=FIELD)
    return Uploaded("model", Full())


def _adapter(folder: Path, names: Collection[str]) -> Uploaded:
    about = read_json(folder / ADAPTER_CONFIG, field=FIELD)
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights != [ADAPTER_WEIGHTS]:
        raise unreadable(f"an adapter has its weights in {ADAPTER_WEIGHTS}; this folder has {weights or 'none'}", FIELD)
    if about.get("peft_type") != "LORA":
        raise _unsupported(f"`peft_type` is {_shown(about.get('peft_type'))}, and LORA (with or without DoRA) is taken")
    for name, only in CHANGES.items():
        if about.get(name) not in (only, None, [], {}):
            raise _unsupported(f"`{name}` is {_shown(about[name])}, which no method of eft trains further")
    tensors = read_header(folder / ADAPTER_WEIGHTS, field=FIELD)
    targets = set()
    for name, tensor in tensors.items():
        pair = PAIR.fullmatch(name)
        if pair is None and not OTHERS.fullmatch(name):
            raise _unsupported(f"it has the tensor {name}, and adapters have pairs of lora_A and lora_B")
        if pair is None:
            continue
        targets.add(pair["module"].rpartition(".")[2])
        rank = tensor.shape[0 if pair["side"] == "A" else -1] if len(tensor.shape) == 2 else None
        if rank != about.get("r"):
            raise unreadable(f"{name} is {list(tensor.shape)}, and {ADAPTER_CONFIG} says `r: {about.get('r')}`", FIELD)
        other = name.replace(f".lora_{pair['side']}.", f".lora_{'B' if pair['side'] == 'A' else 'A'}.")
        if other not in tensors:
            raise unreadable(f"{name} is there, and {other} is not", FIELD)
    if not targets:
        raise unreadable(f"{ADAPTER_WEIGHTS} holds no pair of lora_A and lora_B", FIELD)
    listed = about.get("target_modules")
    fields = {
        "r": about.get("r"),
        "lora_alpha": about.get("lora_alpha"),
        "lora_dropout": about.get("lora_dropout") or 0.0,
        "use_rslora": bool(about.get("use_rslora")),
        "use_dora": bool(about.get("use_dora")),
        "target_modules": sorted(listed) if isinstance(listed, list) else sorted(targets),
        "modules_to_save": about.get("modules_to_save") or [],
    }
    try:
        method = LoRA.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _unsupported(f"`{place}` is {_shown(first['input'])}: {first['msg']}") from error
    named, revision = about.get("base_model_name_or_path"), about.get("revision")
    return Uploaded(
        "adapter",
        method,
        named if isinstance(named, str) and named else None,
        revision if isinstance(revision, str) and revision else None,
    )


def require_finite(path: Path, left: Callable[[], bool]) -> None:
    """ModelError for the first tensor of a file that holds NaN or an infinity."""
    places = read_places(path, field=FIELD)
    with open_regular(path, field=FIELD) as file:
        for name, (tensor, begin) in places.items():
            if tensor.dtype not in _ABOVE:
                continue
            width, last, before = _ABOVE[tensor.dtype]
            file.seek(begin)
            for data in _pieces(file, tensor.numel * width):
                if left():
                    return
                high = data[width - 1 :: width]
                found = re.search(last, high)
                if found and before is not None:
                    beside = data[width - 2 :: width]
                    found = next(
                        (one for one in re.finditer(last, high) if re.match(before, beside[one.start() :])), None
                    )
                if found:
                    words = f"{path.name}: {name} holds NaN or infinite numbers; upload a model that computes"
                    raise ModelError(words, field=FIELD, code="model_not_finite")


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    while size:
        data = file.read(min(CHUNK, size))
        if not data:
            return
        size -= len(data)
        yield data


def _unsupported(why: str) -> ModelError:
    words = f"{ADAPTER_CONFIG}: {why}; merge it into its base model (merge_and_unload), and upload that"
    return ModelError(words, field=FIELD, code="adapter_unsupported")


def _shown(value: Any) -> str:
    return repr(value)[:60]
