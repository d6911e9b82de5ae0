"""What others load: an adapter that plain PEFT reads, or a model that plain transformers reads; tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

from core.spec.axes.method import OFT, Full, LoRA, QLoRA, SettledMethod
from core.train.base.adapters import saves_ends


def save_weights(
    model: nn.Module,
    tokenizer: Any,
    method: SettledMethod,
    artifacts: Path,
    *,
    base: str,
    revision: str | None,
    dtype: torch.dtype,
) -> Path:
    """Write `artifacts/adapter` or `artifacts/model` and answer its path. `base` is what an adapter names as its base
    model, and `revision` the commit of that on the hub; `dtype` is what a full
    model is written in (training keeps float32)."""
    target: Any = model
    match method:
        case LoRA() | QLoRA() | OFT():
            folder = artifacts / "adapter"
            for config in target.peft_config.values():
                config.base_model_name_or_path = base
                config.revision = revision
            target.create_or_update_model_card = _no_card
            target.save_pretrained(folder, safe_serialization=True, save_embedding_layers=saves_ends(target))
        case Full():
            folder = artifacts / "model"
            target.to(dtype).save_pretrained(folder, safe_serialization=True)
        case _ as never:
            assert_never(never)
    tokenizer.save_pretrained(folder)
    return folder


def _no_card(folder: str) -> None:
    """Stands in for PEFT's README.md, which renders two templates: `write_artifacts` writes the card."""
