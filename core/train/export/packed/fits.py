"""What quantised folders cannot hold, found before work begins. Torch-free."""

from __future__ import annotations

from pathlib import Path

from core.errors import ModelError
from core.plan.models.shape import Shape

OTHERWISE = "take `merged` or `gguf` instead"


def refuse_packed(model_dir: Path, kind: str) -> None:
    """ModelError where the linear layers of the model in `model_dir` are of a kind that is not quantised."""
    shape = Shape.of_folder(model_dir, field="export")
    weights = [weight for pattern in shape.patterns for weight in pattern]
    if any(weight.kind == "experts" for weight in weights):
        raise _refused(kind, "its experts are fused, and mixtures of experts are not quantised")
    if any(weight.transposed for weight in weights):
        raise _refused(kind, "its linear layers are transposed (models of the GPT-2 kind)")
    if not any(weight.kind == "linear" for weight in weights):
        raise _refused(kind, "it has no linear layers in blocks")


def _refused(kind: str, why: str) -> ModelError:
    words = f"this model cannot be exported as `{kind}`: {why}; {OTHERWISE}"
    return ModelError(words, field="export", code="packed_refused")
