"""A model from a local folder: safetensors only, no code of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init
from transformers.utils import logging

from core.plan.models.headers import unreadable
from core.plan.models.shape import Shape
from core.spec.axes.stage import Head
from core.train.base.reading import reading
from core.train.hub.model_files import refuse_adapter
from core.train.model.heads import CLASSES
from core.train.model.noise import hush

MOST_TIMES = 2
"""A tied output head counts twice here, and may be all there is."""
ENDINGS: dict[Head, str] = {
    "tokens": "ForCausalLM", "score": "ForSequenceClassification", "labels": "ForTokenClassification"
}  # fmt: skip
"""Endings of the names of transformers' classes with a head."""
SMALL = 1 << 20
"""Parameters that fit into any memory."""


def given_head(folder: Path, wanted: Head) -> Head:
    """Head to load from the files: the wanted one if they have it, otherwise that of a causal language model."""
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    return wanted if wanted != "tokens" and str(classes[0]).endswith(ENDINGS[wanted]) else "tokens"


def load_model(folder: Path, dtype: torch.dtype, device_map: str | None = None, *, head: Head = "tokens") -> nn.Module:
    """A causal language model (or one with another head that its files have) on the CPU, in `dtype`; with
    `device_map="meta"` its shapes alone. ModelError when transformers cannot read it."""
    with reading("the model"):
        refuse_adapter([path.name for path in folder.iterdir()], field="model")
        hold_against_files(folder)
        loaded: Any = CLASSES[head].from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            device_map=device_map,
            output_loading_info=True,
        )
    model, info = loaded
    if lacks := sorted(info["missing_keys"]):  # transformers makes them up
        more = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
        raise unreadable(f"the weight files lack {lacks[0]}{more}", "model")
    found: nn.Module = model
    return found


def hold_against_files(folder: Path) -> None:
    """ModelError where config.json describes a model of more than MOST_TIMES the weights that the files hold: what is
    missing would be made up, and take memory that no plan knows of. Built without memory for its parameters."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"), init.no_init_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    described = sum(parameter.numel() for parameter in model.parameters())
    held = Shape.of_folder(folder).parameters
    if described > MOST_TIMES * held + SMALL:
        raise unreadable(
            f"config.json describes a model of {described:,} parameters, and the weight files hold {held:,}: they do "
            "not belong together",
            "model",
        )


def stored_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of the model's files, as it is there."""
    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_bytes())["weight_map"][name] if index.is_file() else "model.safetensors"
    with safe_open(folder / file, framework="pt") as shard:
        tensor: Tensor = shard.get_tensor(name)
    return tensor


def packed_as(folder: Path) -> str | None:
    """How the weights in the model's files are packed, in words; None when they are dense."""
    about = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if about is None:
        return None
    kind = about.get("bnb_4bit_quant_type") if about.get("load_in_4bit") else None
    return " ".join(str(word) for word in (kind, "by", about.get("quant_method", "an unknown method")) if word)


def quiet() -> None:
    """No progress bars in a log file, no advice that is not for the user."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hush()


def context_length(model: nn.Module) -> int | None:
    """Positions the model was built for, if its configuration says so."""
    value = getattr(model.config, "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model; packed weights count as the weights they stand for."""
    packed = [m for m in model.modules() if isinstance(m, nn.Linear) and "weight" not in m._parameters]
    return sum(p.numel() for p in model.parameters()) + sum(m.in_features * m.out_features for m in packed)


def saved_dtype(folder: Path) -> torch.dtype:
    """The dtype that the model's own files are in; a fully trained model is handed back in the same."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
