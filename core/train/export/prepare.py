"""What the formats of a job need before a GPU is held: libraries, and a model that they can hold. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.spec.axes.export import FP8, GGUF, GPTQ, K_QUANTS, Export
from core.train.export.gguf.fits import refuse_gguf
from core.train.export.packed.fits import refuse_packed
from core.train.tools.install import install


def prepare_exports(exports: Sequence[Export], model_dir: Path, cache_dir: Path, *, offline: bool) -> None:
    """Install what the formats need and check the model. ToolsMissing or ModelError."""
    ggufs = [item for item in exports if isinstance(item, GGUF)]
    if any(item.quantization in K_QUANTS for item in ggufs):
        install("quants", cache_dir, offline=offline, field="export")
    if ggufs:
        refuse_gguf(model_dir, install("gguf", cache_dir, offline=offline, field="export"))
    for item in exports:
        if isinstance(item, FP8 | GPTQ):
            refuse_packed(model_dir, item.type)
            install("compressed", cache_dir, offline=offline, field="export")
