"""Rows of later stages: preferences (two answers), KTO labels (a judged answer), prompts (an answer to be sampled).

The shapes are TRL's (https://huggingface.co/docs/trl/dataset_formats) and OpenAI's `preferred_output`
(https://platform.openai.com/docs/guides/direct-preference-optimization); prompts may be ShareGPT conversations too.
"""

from __future__ import annotations

from typing import Any

from core.data.faults import Faults, kind, optional_text, text
from core.data.formats import sharegpt
from core.data.formats.chat import message, tool_definitions, turns
from core.data.formats.plain import refuse_tools
from core.data.rows import Labelled, Message, Preference, Prompt, PromptOnly

_PROMPTS = ("prompt", "messages", "conversations")


def read_preference(value: dict[str, Any], faults: Faults) -> Preference | None:
    if "preferred_output" in value:
        return _openai(value, faults)
    tools = tool_definitions(value, faults)
    given = [key for key in _PROMPTS if value.get(key) is not None]
    if len(given) > 1:
        faults.add(
            "ambiguous_row", f"the prompt stands in {' and '.join(f'`{key}`' for key in given)}; keep one", given[1]
        )
        return None
    if not given:
        return _implicit(value, faults, tools)
    prompt = _prompt(value, given[0], faults)
    chosen, rejected = (_answer(value[key], key, prompt, faults) for key in ("chosen", "rejected"))
    if prompt is None or chosen is None or rejected is None:
        return None
    return _told_apart(Preference(prompt, chosen, rejected, tools), faults)


def _openai(value: dict[str, Any], faults: Faults) -> Preference | None:
    given = value["input"]
    if not isinstance(given, dict) or "messages" not in given:
        faults.add("invalid_type", f"`input` is an object with `messages`, not {kind(given)}", "input")
        return None
    before = faults.count
    inner = turns(given["messages"], "input.messages", faults, ends="question")
    tools = tool_definitions(given, faults)
    chosen = turns(value["preferred_output"], "preferred_output", faults, ends="answer")
    rejected = turns(value["non_preferred_output"], "non_preferred_output", faults, ends="answer")
    if inner is None or chosen is None or rejected is None or faults.count > before:
        return None
    return _told_apart(Preference(inner, chosen, rejected, tools), faults)


def _implicit(value: dict[str, Any], faults: Faults, tools: tuple[dict[str, Any], ...]) -> Preference | None:
    """No prompt of its own: two whole chats, whose common turns are the prompt."""
    if not isinstance(value["chosen"], list) or not isinstance(value["rejected"], list):
        words = (
            "there is no `prompt`, so what the answers answer is not known. If `chosen` and `rejected` are whole "
            "transcripts that begin alike, put what they have in common into `prompt` and leave the last answers in "
            "`chosen` and `rejected`; or write both as lists of messages"
        )
        faults.add("missing_field", words, "prompt")
        return None
    chosen = turns(value["chosen"], "chosen", faults, ends="answer")
    rejected = turns(value["rejected"], "rejected", faults, ends="answer")
    if chosen is None or rejected is None:
        return None
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    while common and chosen[common - 1].role == "assistant":
        common -= 1
    if common == 0:
        faults.add("missing_field", "the two chats have no turn in common that could be the prompt", "rejected")
        return None
    return _told_apart(Preference(chosen[:common], chosen[common:], rejected[common:], tools), faults)


def _told_apart(row: Preference, faults: Faults) -> Preference:
    if row.chosen == row.rejected:
        faults.add("nothing_to_learn", "the chosen and the rejected answer are the same", "rejected")
    return row


def read_kto(value: dict[str, Any], faults: Faults) -> Labelled | None:
    label = value["label"]
    if not isinstance(label, bool):
        faults.add("invalid_type", f"a label is true or false, not {kind(label)}", "label")
        return None
    tools = tool_definitions(value, faults)
    if "completion" not in value:  # one chat: the last turn is the answer that is judged
        messages = turns(value["messages"], "messages", faults, ends="answer")
        if messages is None:
            return None
        if len(messages) < 2:
            faults.add("missing_field", "a judged answer needs the turns that it answers", "messages")
        return Labelled(messages[:-1], messages[-1:], label, tools)
    prompt = _prompt(value, "prompt", faults)
    completion = _answer(value["completion"], "completion", prompt, faults)
    if prompt is None or completion is None:
        return None
    return Labelled(prompt, completion, label, tools)


def read_prompt(value: dict[str, Any], faults: Faults) -> PromptOnly | None:
    given = [key for key in ("prompt", "messages") if value.get(key) is not None]
    if len(given) != 1:
        words = "the prompt stands in `prompt` or in `messages`, not in both" if given else "there is no prompt"
        faults.add("ambiguous_row" if given else "missing_field", words, "prompt")
        return None
    prompt = _prompt(value, given[0], faults)
    reference = value.get("reference")
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    said = optional_text({"reference": reference}, "reference", "reference", faults)
    tools = tool_definitions(value, faults)
    if prompt is None:
        return None
    extra = {key: item for key, item in value.items() if key not in ("prompt", "messages", "reference", "tools")}
    return PromptOnly(prompt, said, extra, tools)


def _prompt(value: dict[str, Any], key: str, faults: Faults) -> Prompt | None:
    if key == "conversations":
        return sharegpt.conversation(value, faults, ends="question")
    if isinstance(value[key], list):
        return turns(value[key], key, faults, ends="question")
    refuse_tools(value, faults)
    return text(value[key], key, faults, filled=True)


def _answer(value: Any, key: str, prompt: Prompt | None, faults: Faults) -> Prompt | None:
    """An answer of the prompt's own kind: text to text, messages (a list, or one) to messages."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        if isinstance(value, list | dict):
            words = f"the prompt is a string, so `{key}` is one too, not {kind(value)}"
            faults.add("invalid_type", words, key)
            return None
        return text(value, key, faults, filled=True)
    if isinstance(value, dict):
        read = sharegpt.turn if "from" in value else message
        one: Message = read(value, key, faults)
        if one.role not in ("assistant", ""):
            faults.add("no_answer", "an answer is the assistant's", key)
        return (one,)
    if isinstance(value, str):
        return (Message("assistant", text(value, key, faults, filled=True)),)
    return turns(value, key, faults, ends="answer")
