"""A model folder in Hugging Face format, checked and measured without torch.

What is read: config.json and the headers of the safetensors files
(https://huggingface.co/docs/safetensors, "Format"): eight bytes little-endian length, that much JSON, then the data.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.plan.models.config import check_numbers
from core.plan.models.headers import (
    BUFFERS,
    INDEX_FILE,
    OUTPUT_HEAD,
    PICKLE_SUFFIXES,
    Tensor,
    read_header,
    read_json,
    ties_head,
    unpacked,
    unreadable,
    weight_files,
)
from core.plan.models.shape import hold_against_files
from core.train.hub.unpack.packing import Packing, hold_packing_against_files, packing_of

__all__ = [
    "INDEX_FILE", "PICKLE_SUFFIXES", "Summary", "Tensor", "causal_lm_classes", "check_config", "check_tokenizer",
    "inspect", "read_header", "read_json", "refuse_adapter", "unpacked", "unreadable", "weight_files",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """What may be said of a model without loading it."""

    parameters: int
    """As the meta device counts them: tied weights once, constants not at all."""
    bytes: int
    """Size of the weight files, bytes."""
    dtypes: dict[str, int]
    """Parameters per stored dtype, in safetensors' names (`F32`, `BF16`, …), or `NF4`."""
    model_type: str
    architecture: str
    """The transformers class that will be built."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(folder: Path, *, field: str) -> Summary:
    """Check that `folder` holds a causal language model we can load safely, and measure it.

    Raises ModelError (naming `field`) when something is missing, broken, needs code of its own, or is pickled.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    config = read_json(folder / "config.json", field=field)
    architecture = check_config(config, field=field)
    refuse_adapter(names, field=field)
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
    if (packing := unpacked_before(config, field=field)) is None:
        hold_against_files(config, tensors, field=field)
    else:
        hold_packing_against_files(packing, tensors, field=field)
    counted = {name: tensor for name, tensor in unpacked(tensors).items() if not BUFFERS.search(name)}
    if ties_head(config) and len(counted) > 1:
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


def unpacked_before(config: dict[str, Any], *, field: str) -> Packing | None:
    """How the weights are unpacked before training; None where they are dense, or trained over as they are."""
    about = config.get("quantization_config")
    return None if about is None else packing_of(about, field=field)


def refuse_adapter(names: Collection[str], *, field: str) -> None:
    """ModelError where an adapter lies beside a model's own weights. transformers and PEFT load such an adapter on top
    of the model without being asked, so that it is not clear what is to be trained."""
    if "adapter_config.json" in names and "config.json" in names:
        raise ModelError(
            "the folder holds a model (config.json) and an adapter (adapter_config.json), and transformers would load "
            "the adapter over the model; move the adapter_* files out of the folder to train the model as it is, or "
            "merge the adapter into it first",
            field=field,
            code="model_unsupported",
        )


def check_config(config: dict[str, Any], *, field: str) -> str:
    """The transformers class for this config.json; ModelError when there is none, or when the weights are packed in a
    way that cannot be trained over."""
    check_numbers(config, field=field)
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
        packing_of(config["quantization_config"], field=field)
    return architecture


def check_tokenizer(names: Collection[str], *, field: str) -> None:
    if not {"tokenizer.json", "tokenizer.model"} & set(names) and not {"vocab.json", "merges.txt"} <= set(names):
        raise unreadable("no tokenizer is there (tokenizer.json, tokenizer.model, or vocab.json and merges.txt)", field)


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
