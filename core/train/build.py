"""The model of a run: load → check → adapt → place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from torch import nn

from core.errors import SpecError
from core.spec.job import JobSpec
from core.spec.training import Full, LoRA, NoQuantization
from core.train.checkpoint.rng import seed_all
from core.train.events import EventWriter
from core.train.load import context_length, load_model
from core.train.placement import Placement


def build_model(
    spec: JobSpec,
    model_dir: Path,
    placement: Placement,
    tokenizer: Any,
    *,
    longest: int,
    events: EventWriter,
    between: Callable[[], None],
) -> nn.Module:
    """The model with what its method adds, on its device, every random number drawn from the job's seed. `longest`:
    tokens of the longest row. `between` may raise to stop."""
    model = load_model(model_dir, placement.weights)
    between()
    _check_fit(model, tokenizer, longest, events)
    seed_all(spec.training.seed)
    model = _adapt(model, spec, placement)
    model.to(placement.device)
    if spec.memory.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def _adapt(model: nn.Module, spec: JobSpec, placement: Placement) -> nn.Module:
    match spec.quantization:
        case NoQuantization():
            pass
        case _ as never:
            assert_never(never)
    match spec.method:
        case LoRA():
            from core.train.methods.lora import adapt_lora

            return adapt_lora(model, spec.method, autocast=placement.autocast is not None)
        case Full():
            from core.train.methods.full import adapt_full

            return adapt_full(model)
        case _ as unknown:
            assert_never(unknown)


def _check_fit(model: Any, tokenizer: Any, longest: int, events: EventWriter) -> None:
    embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings:
        raise SpecError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {embeddings}: they do not belong together",
            field="model",
        )
    context = context_length(model)
    if context is not None and longest > context:
        events.write(
            "notice",
            code="beyond_context",
            message=f"rows of {longest} tokens are longer than the {context} positions the model was built for",
        )
