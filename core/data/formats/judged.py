"""Rows of later stages: preferences (two answers), KTO labels (a judged answer), prompts (an answer to be sampled).

The shapes are TRL's (https://huggingface.co/docs/trl/dataset_formats) and OpenAI's `preferred_output`
(https://platform.openai.com/docs/guides/direct-preference-optimization); prompts may be ShareGPT conversations too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from core.data.faults import Faults, kind, optional_text, text
from core.data.formats import sharegpt
from core.data.formats.chat import message, tool_definitions, turns
from core.data.formats.plain import refuse_tools
from core.data.rows import Labelled, Message, Preference, Prompt, PromptOnly

_PROMPTS = ("prompt", "messages", "conversations")
_WORDS = re.compile(r"(.*\S)\s", re.DOTALL)
"""All whole words but the last, which goes on differently, or is all that is left of one of the answers."""
MOST_MARGIN = 1e6
"""Rewards are of the order of one; beyond this float32 has no digits left for them."""


def read_preference(value: dict[str, Any], faults: Faults) -> Preference | None:
    margin = _margin(value, faults)
    row = _openai(value, faults) if "preferred_output" in value else _pair(value, faults)
    if row is None:
        return None
    if row.chosen == row.rejected:
        words = "the chosen and the rejected answer are the same; correct one of them, or remove the row"
        faults.add("nothing_to_learn", words, "non_preferred_output" if "preferred_output" in value else "rejected")
    return replace(row, margin=margin)


def _pair(value: dict[str, Any], faults: Faults) -> Preference | None:
    """`chosen` and `rejected`, with the prompt beside them or at the beginning of both."""
    tools = tool_definitions(value, faults)
    given = [key for key in _PROMPTS if value.get(key) is not None]
    if len(given) > 1:
        faults.add(
            "ambiguous_row", f"the prompt stands in {' and '.join(f'`{key}`' for key in given)}; keep one", given[1]
        )
        return None
    chats = isinstance(value["chosen"], list) and isinstance(value["rejected"], list)
    if not given:
        if chats:
            return _chats_in_common(value, faults, tools)
        return _text_in_common(value, faults)
    if chats and isinstance(value[given[0]], str):
        return _prompt_as_text(value, faults, tools)
    prompt = prompt_of(value, given[0], faults)
    chosen, rejected = (_answer(value[key], key, prompt, faults) for key in ("chosen", "rejected"))
    if prompt is None or chosen is None or rejected is None:
        return None
    if isinstance(prompt, tuple) and chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # both repeat the prompt before the answer
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        _begins_with_an_answer(prompt, answer, key, faults)
    return Preference(prompt, chosen, rejected, tools)


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
    return Preference(inner, chosen, rejected, tools)


def _chats_in_common(value: dict[str, Any], faults: Faults, tools: tuple[dict[str, Any], ...]) -> Preference | None:
    """No prompt of its own: two whole chats, whose common turns are the prompt."""
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
    return Preference(chosen[:common], chosen[common:], rejected[common:], tools)


def _text_in_common(value: dict[str, Any], faults: Faults) -> Preference | None:
    """No prompt of its own: two transcripts, whose common beginning is the prompt, up to a whole word."""
    before = faults.count
    chosen, rejected = (text(value[key], key, faults, filled=True) for key in ("chosen", "rejected"))
    if faults.count > before:
        return None
    if chosen == rejected:
        return Preference("", chosen, rejected)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    alike = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(chosen), len(rejected)))
    words_alike = _WORDS.match(chosen[:alike])
    prompt = "" if words_alike is None else words_alike[1]
    if not prompt:
        words = (
            "there is no `prompt`, and `chosen` and `rejected` do not begin alike, so what they answer is not known: "
            "put the question into `prompt`, or write both as whole transcripts or lists of messages"
        )
        faults.add("missing_field", words, "prompt")
        return None
    refuse_tools(value, faults)
    words = (
        "no `prompt`: the text that both answers begin with is taken as the prompt; if it names its speakers itself, "
        "set `data.rendering.pairs` of the job to `apart`"
    )
    faults.notice("implicit_prompt", words)
    return Preference(prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def _prompt_as_text(value: dict[str, Any], faults: Faults, tools: tuple[dict[str, Any], ...]) -> Preference | None:
    """A prompt as text beside two whole chats, one of whose common turns it is."""
    row = _chats_in_common(value, faults, tools)
    if row is None:
        return None
    said = text(value["prompt"], "prompt", faults)
    if not any(isinstance(turn, Message) and turn.content.strip() == said.strip() for turn in row.prompt):
        words = (
            "`chosen` and `rejected` are whole chats, and none of their common turns is this text; remove `prompt`, or "
            "write it as a list of messages and leave the answers alone in `chosen` and `rejected`"
        )
        faults.add("ambiguous_row", words, "prompt")
    return row


def _begins_with_an_answer(prompt: Prompt, answer: Prompt, key: str, faults: Faults) -> None:
    """What follows a prompt of messages is the assistant's; a user's turn there is a second question, or the prompt
    once more."""
    if isinstance(prompt, str) or isinstance(answer, str) or len(answer) < 2 or answer[0].role in ("assistant", ""):
        return  # of a single turn `_answer` has said it
    words = f"the answer begins with a {answer[0].role} turn; leave the turns of the prompt out of `{key}`"
    faults.add("role_order", words, f"{key}[0].role")


def _margin(value: dict[str, Any], faults: Faults) -> float | None:
    margin = value.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        faults.add("invalid_type", f"a margin is a number, not {kind(margin)}", "margin")
        return None
    if not abs(margin) <= MOST_MARGIN:
        faults.add("invalid_value", f"a margin lies between -{MOST_MARGIN:g} and {MOST_MARGIN:g}", "margin")
        return None
    return float(margin)


def read_kto(value: dict[str, Any], faults: Faults) -> Labelled | None:
    label = judgement(value["label"], "label", faults)
    if label is None:
        return None
    tools = tool_definitions(value, faults)
    if "completion" not in value:  # one chat: the last turn is the answer that is judged
        messages = turns(value["messages"], "messages", faults, ends="answer")
        if messages is None:
            return None
        if len(messages) < 2:
            faults.add("missing_field", "a judged answer needs the turns that it answers", "messages")
        return Labelled(messages[:-1], messages[-1:], label, tools)
    prompt = prompt_of(value, "prompt", faults)
    completion = _answer(value["completion"], "completion", prompt, faults)
    if prompt is None or completion is None:
        return None
    _begins_with_an_answer(prompt, completion, "completion", faults)
    return Labelled(prompt, completion, label, tools)


def judgement(value: Any, where: str, faults: Faults) -> bool | None:
    """A label of an answer or a step: a boolean. Nothing else is taken for one, since what `good`, `1` or `-1` mean
    differs between files."""
    if isinstance(value, bool):
        return value
    given = f"{value[:40]!r}" if isinstance(value, str) else kind(value)
    words = f"a label is true (good, right) or false (bad, wrong), not {given}; write it as a JSON boolean"
    faults.add("invalid_type", words, where)
    return None


def read_prompt(value: dict[str, Any], faults: Faults) -> PromptOnly | None:
    given = [key for key in ("prompt", "messages") if value.get(key) is not None]
    if len(given) != 1:
        words = "the prompt stands in `prompt` or in `messages`, not in both" if given else "there is no prompt"
        faults.add("ambiguous_row" if given else "missing_field", words, "prompt")
        return None
    prompt = prompt_of(value, given[0], faults)
    reference = value.get("reference")
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    said = optional_text({"reference": reference}, "reference", "reference", faults)
    tools = tool_definitions(value, faults)
    if prompt is None:
        return None
    extra = {key: item for key, item in value.items() if key not in ("prompt", "messages", "reference", "tools")}
    return PromptOnly(prompt, said, extra, tools)


def prompt_of(value: dict[str, Any], key: str, faults: Faults) -> Prompt | None:
    """A prompt in one of its forms: text, messages, or a ShareGPT conversation."""
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
