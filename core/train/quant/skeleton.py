"""A transformers model without memory for its parameters, and what is left to do once it has them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.errors import ModelError
from core.train.base.reading import reading


def skeleton(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, its configuration). Parameters are on the meta device; constants that are in no file have their values.
    ModelError when the folder cannot be read."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with reading("the model"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Buffers outside the files (rotary frequencies) are computed by the constructors, so they get real memory.
        with init_empty_weights(include_buffers=False), _without_memory(nn.Linear, nn.Embedding):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
        _compute_constants(model, model)
    return model, config


def _compute_constants(module: Any, owner: Any) -> None:
    """Constants that are in no file (rotary positions) are made by `dtype`'s arithmetic in the constructors: GPT-J's
    would be off by whole positions in bfloat16. `from_pretrained` makes them again in float32, by the same method."""
    for child in module.children():
        _compute_constants(child, child if hasattr(child, "_init_weights") else owner)
    if module._non_persistent_buffers_set and not module._parameters:
        with torch.no_grad():
            owner._init_weights(module)


@contextmanager
def _without_memory(*layers: type[nn.Module]) -> Iterator[None]:
    """Within, these layers make their weights on the meta device. accelerate makes them first and drops them then: no
    memory is touched, but it is taken from the kernel, which counts it where that is limited (RLIMIT_DATA)."""

    def on_meta(init: Callable[..., None]) -> Callable[..., None]:
        at = list(signature(init).parameters).index("device")

        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **(kwargs if len(args) >= at else {"device": "meta"} | kwargs))

        return wrapped

    inits = [layer.__init__ for layer in layers]
    for layer in layers:
        layer.__init__ = on_meta(layer.__init__)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, init in zip(layers, inits, strict=True):
            layer.__init__ = init  # type: ignore[method-assign]


def finish(model: Any, folder: Path) -> None:
    """In eval mode, with the generation settings of its folder. ModelError when a tensor got no values."""
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError(f"{left[0]} got no values from the files", field="model")
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        with reading("the model's generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # PEFT and transformers would look for bitsandbytes' modules
    model.eval()
