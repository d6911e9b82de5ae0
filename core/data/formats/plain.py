"""Rows of plain strings: instruction (Alpaca), prompt and completion, text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.data.faults import Faults, kind, optional_text, text
from core.data.formats.chat import tool_definitions, turns
from core.data.rows import Chat, Instruction, PromptCompletion, Text


def read_instruction(value: dict[str, Any], faults: Faults) -> Instruction:
    for key in ("system", "history"):  # LLaMA-Factory's Alpaca files may have them
        if value.get(key):
            faults.add("unsupported_field", f"`{key}` would be lost; write such rows as `messages`", key)
    refuse_tools(value, faults)
    return Instruction(
        text(value["instruction"], "instruction", faults, filled=True),
        optional_text(value, "input", "input", faults) or "",
        text(value["output"], "output", faults, filled=True),
    )


def read_prompt_completion(value: dict[str, Any], faults: Faults) -> PromptCompletion | Chat | None:
    """Two strings; or two lists of messages (TRL's conversational form), of which the completion alone is learned."""
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = turns(prompt, "prompt", faults, ends="question")
        answered = turns(completion, "completion", faults, ends="answer")
        if asked is None or answered is None:
            return None
        before = tuple(replace(turn, weight=0.0) if turn.role == "assistant" else turn for turn in asked)
        return Chat((*before, *answered), tool_definitions(value, faults))
    if isinstance(prompt, list) != isinstance(completion, list):
        words = f"`prompt` is {kind(prompt)} and `completion` {kind(completion)}; both are strings, or both messages"
        faults.add("invalid_type", words, "completion")
        return None
    refuse_tools(value, faults)
    return PromptCompletion(text(prompt, "prompt", faults), text(completion, "completion", faults, filled=True))


def refuse_tools(value: dict[str, Any], faults: Faults) -> None:
    """Plain strings have no place for the definitions of tools."""
    if value.get("tools"):
        faults.add(
            "unsupported_field", "`tools` would be lost beside plain text; write such rows as `messages`", "tools"
        )


def read_text(value: dict[str, Any], faults: Faults) -> Text:
    refuse_tools(value, faults)
    return Text(text(value["text"], "text", faults, filled=True))
