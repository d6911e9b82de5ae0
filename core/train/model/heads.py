"""Heads of reward models: a new output layer in the place of a language model's own, in float32 and trained.

The result is the class that transformers has for it (…ForSequenceClassification, …ForTokenClassification) over the same
backbone, so that what a job hands back loads with plain transformers and PEFT. Weights of the backbone stay what they
are: dense, packed or streamed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers import initialization as init

from core.errors import ModelError
from core.spec.axes.stage import Head

TASKS: dict[Head, str] = {"tokens": "CAUSAL_LM", "score": "SEQ_CLS", "labels": "TOKEN_CLS"}
"""PEFT's names of what a model with the head does."""
CLASSES: dict[Head, Any] = {
    "tokens": AutoModelForCausalLM,
    "score": AutoModelForSequenceClassification,
    "labels": AutoModelForTokenClassification,
}
LABELS: dict[Head, dict[int, str]] = {"tokens": {}, "score": {0: "score"}, "labels": {0: "wrong", 1: "right"}}
"""What the numbers of a head mean."""


def causal_base(model: Any) -> Any:
    """The transformers model, inside a PeftModel or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_head(model: Any) -> bool:
    """Whether the model has the head of a reward model, and no logits of the next token."""
    return causal_base(model).get_output_embeddings() is None


def head_kind(model: Any) -> Head:
    """The head that the model has."""
    if not has_head(model):
        return "tokens"
    return "score" if causal_base(model).config.num_labels == 1 else "labels"


def backbone_of(model: Any) -> nn.Module:
    base = causal_base(model)
    found: nn.Module = getattr(base, base.base_model_prefix)
    return found


def head_name(model: Any) -> str:
    """Name of the head's module."""
    base = causal_base(model)
    (name,) = [name for name, child in base.named_children() if name != base.base_model_prefix and _parameters(child)]
    return str(name)


def head_of_model(model: Any) -> nn.Module:
    """The head; beside adapters, the copy of it that is trained."""
    base = causal_base(model)
    found: nn.Module = getattr(base, head_name(model))
    return found


def with_head(model: Any, head: Head, pad_token_id: int | None) -> Any:
    """Replace the model's own head by a new one, drawn from the torch generator. A model that has such a head already
    keeps it. ModelError where transformers has no class for it."""
    config = model.config
    if has_head(model):
        config.get_text_config().pad_token_id = pad_token_id
        return model
    auto, kind = CLASSES[head], config.model_type
    if type(config) not in auto._model_mapping:
        raise _no_class(kind, head, "transformers has no such class")
    config.num_labels = len(LABELS[head])
    config.id2label, config.label2id = LABELS[head], {name: number for number, name in LABELS[head].items()}
    config.get_text_config().pad_token_id = pad_token_id
    with torch.device("meta"), init.no_init_weights():
        found = auto.from_config(config, trust_remote_code=False)
    prefix = model.base_model_prefix
    same = found.base_model_prefix == prefix and type(getattr(found, prefix, None)) is type(
        getattr(model, prefix, None)
    )
    if not same:
        raise _no_class(kind, head, "its class has another backbone")
    setattr(found, prefix, getattr(model, prefix))
    found.config = config
    layers = [(name, child) for name, child in found.named_children() if name != prefix and _parameters(child)]
    if len(layers) != 1 or type(layers[0][1]) is not nn.Linear:
        raise _no_class(kind, head, "its head is not one linear layer")
    name, layer = layers[0]
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=torch.float32)
    with torch.no_grad():
        made.weight.normal_(0.0, float(getattr(config.get_text_config(), "initializer_range", 0.02)))
        if made.bias is not None:
            made.bias.zero_()
    setattr(found, name, made)
    return found.eval()


def pad_token_of(tokenizer: Any) -> int | None:
    """A padding token that does not end rows. transformers takes the last token that is not padding for the end of a
    row, so with the end-of-sequence token as padding it would score the token before it. None where the tokenizer has
    no other token; plain transformers then scores one row at a time."""
    own = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id]
    return next((int(token) for token in own if token is not None and token != tokenizer.eos_token_id), None)


def _parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _no_class(kind: str, head: Head, why: str) -> ModelError:
    wanted = {"score": "sequence", "labels": "token"}[head]
    return ModelError(
        f"models of the type `{kind}` cannot become reward models: transformers would load them for {wanted} "
        f"classification, and {why}; use another base model",
        field="model",
    )
