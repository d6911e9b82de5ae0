"""Tokens of a request's prompt, and those that end an answer."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from torch import nn

from core.spec.serving.request import CompletionRequest
from core.train.session.faults import BadOperation


def prompt_of(tokenizer: Any, asked: CompletionRequest, vocabulary: int) -> list[int]:
    """Tokens of the prompt. BadOperation for a conversation that the chat template refuses, and for no tokens."""
    if asked.messages is not None:
        if not tokenizer.chat_template:
            words = "this model has no chat template; ask it by `/v1/completions`"
            raise BadOperation(words, field="messages", code="no_chat_template")
        try:
            text = tokenizer.apply_chat_template(asked.messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            words = f"the model's chat template refuses these messages: {error}"
            raise BadOperation(words, field="messages", code="chat_template_failed") from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(asked.prompt, str):
        tokens = tokenizer(asked.prompt)["input_ids"]
    else:
        tokens = list(asked.prompt or [])
    if not tokens:
        raise BadOperation("the prompt has no tokens", field="prompt")
    if max(tokens) >= vocabulary or min(tokens) < 0:
        words = f"a token of the prompt is not between 0 and {vocabulary - 1}"
        raise BadOperation(words, field="prompt")
    return [int(token) for token in tokens]


def stop_tokens(tokenizer: Any, model: nn.Module) -> tuple[int, ...]:
    """Tokens that end an answer: those of the tokenizer and of the model's generation_config."""
    found: set[int] = set()
    for holder in (tokenizer, getattr(model, "generation_config", None)):
        ids = getattr(holder, "eos_token_id", None)
        found.update([] if ids is None else ids if isinstance(ids, list) else [ids])
    return tuple(sorted(int(token) for token in found))
