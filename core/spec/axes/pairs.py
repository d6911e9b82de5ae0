"""How a `prompt` and its `completion` become one text: the ways, the default of a model, and what people are told.

One truth for the trainer, the checker, the plan and the model card, so it knows neither torch nor a tokenizer.
"""

from __future__ import annotations

from typing import Literal, assert_never, get_args

Way = Literal["chat", "newline", "space", "apart", "joined"]
WAYS: tuple[Way, ...] = get_args(Way)
Pairs = Literal["auto", "chat", "newline", "space", "apart", "joined"]
EXAMPLE = "What is the capital of France?"
"""A prompt to show with: what is sent to the tuned model in its place."""
WITHOUT_TEMPLATE: Way = "newline"
"""The default of a model without a chat template (bench/quality.py measures the ways)."""


def way_of(chosen: Pairs, *, has_template: bool) -> Way:
    """The way that `data.rendering.pairs` comes to with a model."""
    if chosen == "auto":
        return "chat" if has_template else WITHOUT_TEMPLATE
    return chosen


def bordered(way: Way, prompt: str, completion: str) -> tuple[str, str]:
    """The two strings with the border that the way puts between them. The prompt's part depends on the prompt alone,
    since whoever asks the tuned model has nothing else."""
    match way:
        case "newline":
            return asked(way, prompt), completion
        case "space":
            return prompt, completion if not completion or completion[0].isspace() else f" {completion}"
        case "chat" | "apart" | "joined":
            return prompt, completion
        case _ as never:
            assert_never(never)


def asked(way: Way, prompt: str) -> str:
    """The plain text to send to the tuned model for a prompt; with `chat` the user's message."""
    if way == "newline" and prompt and not prompt[-1].isspace():
        return f"{prompt}\n"
    return prompt


def done_with(way: Way) -> str:
    """What becomes of a pair, in words."""
    match way:
        case "chat":
            return "each pair becomes a chat: the prompt is the user's message, the completion the assistant's answer"
        case "newline":
            return (
                "a line break follows each prompt that does not end in white space; prompt and completion are "
                "tokenised apart"
            )
        case "space":
            return (
                "a space precedes each completion that does not begin with white space; prompt and completion are "
                "tokenised apart"
            )
        case "apart":
            return "prompt and completion are tokenised apart, with nothing between them"
        case "joined":
            return (
                "prompt and completion are tokenised as one string; tokens may merge across their border, and the "
                "tuned model then never sees the prompt as you send it"
            )
        case _ as never:
            assert_never(never)


def how_to_ask(way: Way) -> str:
    """What to send to the tuned model, in words."""
    match way:
        case "chat":
            return "send the prompt as the user's message, through the chat template that the model carries"
        case "newline":
            return "send the prompt as plain text, with a line break behind it unless it ends in white space"
        case "space":
            return "send the prompt as plain text; the answer begins with a space"
        case "apart" | "joined":
            return "send the prompt as plain text"
        case _ as never:
            assert_never(never)


def told(chosen: Pairs) -> str:
    """Describe both forms, when it is unknown whether the model has a chat template."""
    if chosen != "auto":
        return f"{done_with(chosen)}. To ask the tuned model, {how_to_ask(chosen)}."
    return (
        "with a chat template, the prompt becomes the user's message and the completion the assistant's answer; a "
        f"model without one gets plain text: {done_with(WITHOUT_TEMPLATE)}. Ask the tuned model in the same form; the "
        "model card shows an example."
    )
