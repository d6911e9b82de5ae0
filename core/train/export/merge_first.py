"""A model into which the adapter of an earlier job is merged before another job trains it (`model.adapter: merge`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel

from core.spec.axes.quantization import FrozenFormat
from core.train.base.reading import reading
from core.train.export.merge import write_merged
from core.train.model.as_trained import load_as_trained
from core.train.model.load import saved_dtype
from core.train.vocabulary.rows import grow

WEIGHTS = ("adapter_", "README")
"""Beginnings of the names in an adapter's folder that are not its tokenizer's."""


def write_merged_model(base: Path, adapter: Path, quantization: FrozenFormat | None, folder: Path) -> None:
    """Write the model in `base` with `adapter` merged into its weights, in the dtype of its files, and the adapter's
    tokenizer. Weights that were packed while the adapter was trained are packed and dequantised first, so that the
    result is the model that was trained. ModelError when they cannot be read together."""
    dtype = saved_dtype(base)
    with reading("the adapter of an earlier job"):
        model: Any = load_as_trained(base, dtype, quantization)
        config: Any = PeftConfig.from_pretrained(str(adapter))
        if rows := getattr(config, "trainable_token_indices", None):
            grow(model, next(iter(rows.values())))
        model = PeftModel.from_pretrained(model, str(adapter))
        write_merged(model, folder, model_dir=base, dtype=dtype)
    for path in adapter.iterdir():
        if path.is_file() and not path.name.startswith(WEIGHTS):
            shutil.copyfile(path, folder / path.name)
