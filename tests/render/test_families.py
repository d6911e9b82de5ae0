"""Template families: golden tokens of each, equality with the models' own templates, and the masks of both.

The models' own templates are those that TRL carries (and SmolLM2's, from its file); ours are held against them by
transformers' own engine, so that neither our templates nor our sandbox is its own witness.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from core.data.rows import Chat, Message, PromptOnly, ToolCall
from core.errors import DataError, SpecError
from core.spec.axes.rendering import FamilyTemplate
from core.train.render.families import FAMILIES
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered
from tests.support.chats import TOOLS, chats, tool_chats
from tests.support.family_tokenizers import SENTENCEPIECE, family_tokenizer

FEW = settings(max_examples=15, deadline=None, derandomize=True, database=None)

SYSTEM = Message("system", "Be brief.")
TURNS = (
    Message("user", "What is 1+1? "),
    Message("assistant", " It is 2.\n"),
    Message("user", "And red"),
    Message("assistant", "blue"),
)

# From the formats' public definitions, written by hand. «…» is what is learned.
GOLDEN: dict[str, str] = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1? <|im_end|>\n"
    "<|im_start|>assistant\n« It is 2.\n<|im_end|>»\n<|im_start|>user\nAnd red<|im_end|>\n"
    "<|im_start|>assistant\n«blue<|im_end|>»\n",
    "command-r": "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>What is 1+1?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«It is 2.<|END_OF_TURN_TOKEN|>»"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And red<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«blue<|END_OF_TURN_TOKEN|>»",
    "deepseek": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>What is 1+1? "
    "<｜Assistant｜>« It is 2.\n<｜end▁of▁sentence｜>»<｜User｜>And red<｜Assistant｜>«blue<｜end▁of▁sentence｜>»",
    "gemma": "<bos><start_of_turn>user\nWhat is 1+1?<end_of_turn>\n<start_of_turn>model\n«It is 2.<end_of_turn>»\n"
    "<start_of_turn>user\nAnd red<end_of_turn>\n<start_of_turn>model\n«blue<end_of_turn>»\n",
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nWhat is 1+1?<end_of_turn>\n<start_of_turn>model\n"
    "«It is 2.<end_of_turn>»\n<start_of_turn>user\nAnd red<end_of_turn>\n<start_of_turn>model\n«blue<end_of_turn>»\n",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>What is 1+1? <|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>« It is 2.\n<|end_of_text|>»\n"
    "<|start_of_role|>user<|end_of_role|>And red<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>«blue<|end_of_text|>»\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 1+1? [/INST]« It is 2. </s>»"
    "<s>[INST] And red [/INST]« blue </s>»",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 2.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd red<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«blue<|eot_id|>»",
    "llama3.1": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 2.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd red<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«blue<|eot_id|>»",
    "mistral": "<s>[INST] What is 1+1? [/INST]« It is 2.</s>»[INST] Be brief.\n\nAnd red[/INST]« blue</s>»",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is 1+1? <|end|>\n<|assistant|>\n« It is 2.\n<|end|>»\n"
    "<|user|>\nAnd red<|end|>\n<|assistant|>\n«blue<|end|>»\n<|endoftext|>",
    "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>What is 1+1? <|im_end|>"
    "<|im_start|>assistant<|im_sep|>« It is 2.\n<|im_end|>»<|im_start|>user<|im_sep|>And red<|im_end|>"
    "<|im_start|>assistant<|im_sep|>«blue<|im_end|>»",
    "qwen2.5": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1? <|im_end|>\n"
    "<|im_start|>assistant\n« It is 2.\n<|im_end|>»\n<|im_start|>user\nAnd red<|im_end|>\n"
    "<|im_start|>assistant\n«blue<|im_end|>»\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1? <|im_end|>\n"
    "<|im_start|>assistant\n« It is 2.\n<|im_end|>»\n<|im_start|>user\nAnd red<|im_end|>\n"
    "<|im_start|>assistant\n«<think>\n\n</think>\n\nblue<|im_end|>»\n",
    "smollm2": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1? <|im_end|>\n"
    "<|im_start|>assistant\n« It is 2.\n<|im_end|>»\n<|im_start|>user\nAnd red<|im_end|>\n"
    "<|im_start|>assistant\n«blue<|im_end|>»\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nWhat is 1+1? </s>\n<|assistant|>\n« It is 2.\n</s>»\n"
    "<|user|>\nAnd red</s>\n<|assistant|>\n«blue</s>»\n",
}

# TRL's copies of the models' own templates, and of what it trains with.
VENDORS = {
    "command-r": "cohere",
    "deepseek": "deepseekv3",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "llama3": "llama3",
    "llama3.1": "llama3_1",
    "phi3": "phi3",
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
}
SYSTEMLESS = ("gemma",)
ALTERNATING = ("command-r", "gemma", "gemma3", "llama2", "mistral")


def vendor(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def family(name: str, tokenizer: Any = None) -> Renderer:
    tokenizer = tokenizer if tokenizer is not None else family_tokenizer(name)
    return Renderer(tokenizer, RenderOptions(rendering=FamilyTemplate(name=name)))


@cache
def own(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer, RenderOptions())


@cache
def with_template(name: str, source: str) -> Any:
    tokenizer = copy.copy(family_tokenizer(name))
    tokenizer.chat_template = source
    return tokenizer


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.as_dict() for message in messages]


# --- golden tokens -----------------------------------------------------------------------------------------


def test_every_family_has_its_golden_tokens() -> None:
    assert set(GOLDEN) == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "sentencepiece"), [(name, False) for name in FAMILIES] + [(name, True) for name in SENTENCEPIECE]
)
def test_golden_tokens(name: str, sentencepiece: bool) -> None:
    tokenizer = family_tokenizer(name, sentencepiece=sentencepiece)
    text, learned = "", []
    for at, piece in enumerate(GOLDEN[name].replace("»", "«").split("«")):
        text += piece
        learned += [at % 2 == 1] * len(piece)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    messages = TURNS if name in SYSTEMLESS else (SYSTEM, *TURNS)
    rendered = family(name, tokenizer).render(Chat(messages), 1)
    assert rendered.ids == encoding["input_ids"]
    # Every token by its last character; a span that begins inside a token would show as a difference here.
    assert rendered.learned == [learned[end - 1] for _, end in encoding["offset_mapping"]]
    assert not rendered.cut_prompt
    for token in FAMILIES[name].tokens:
        assert rendered.ids.count(tokenizer.convert_tokens_to_ids(token)) == text.count(token)


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_prompts(name: str) -> None:
    """What a model is given when it is asked: the golden text up to where it begins to write."""
    tokenizer = family_tokenizer(name)
    messages = TURNS[:1] if name in SYSTEMLESS else (SYSTEM, *TURNS[:1])
    expected = GOLDEN[name].partition("«")[0]
    if name == "mistral":  # the system text stands in the last question, and this is it
        expected = "<s>[INST] Be brief.\n\nWhat is 1+1? [/INST]"
    rendered = family(name, tokenizer).render_prompt(PromptOnly(messages), 1)
    assert rendered.ids == tokenizer(expected, add_special_tokens=False)["input_ids"], tokenizer.decode(rendered.ids)
    assert not any(rendered.learned)


def test_thoughts_of_deepseek_are_left_out_where_nothing_is_learned() -> None:
    thinking = Message("assistant", "<think>one, two</think>It is 2.", weight=0)
    chat = Chat((Message("user", "1+1?"), thinking, Message("user", "And 2+2?"), Message("assistant", "4.")))
    tokenizer = family_tokenizer("deepseek")
    rendered = family("deepseek").render(chat, 1)
    assert learned_text(tokenizer, rendered) == "4.<｜end▁of▁sentence｜>"
    assert "It is 2." in tokenizer.decode(rendered.ids) and "one, two" not in tokenizer.decode(rendered.ids)
    with pytest.raises(DataError, match="leaves out the reasoning of an answer that is learned") as error:
        family("deepseek").render(Chat((Message("user", "1+1?"), replace(thinking, weight=None))), 3)
    assert (error.value.code, error.value.field) == ("not_in_template", "line 3: messages[1].content")


def test_thoughts_and_tools_of_qwen3() -> None:
    call = ToolCall("1", "add", {"a": 1, "b": [2, "ü"]})
    messages = (
        Message("user", "Add."),
        Message("assistant", "", tool_calls=(call, call), reasoning="I add."),
        Message("tool", "3", tool_call_id="1"),
        Message("tool", "4", tool_call_id="1"),
        Message("assistant", "<think>\nEasy.\n</think>\n\nIt is 3."),
    )
    tokenizer = family_tokenizer("qwen3")
    rendered = family("qwen3").render(Chat(messages, (TOOLS[0],)), 1)
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'
    assert learned_text(tokenizer, rendered) == (
        f"<think>\nI add.\n</think>\n\n{one}\n{one}<|im_end|><think>\nEasy.\n</think>\n\nIt is 3.<|im_end|>"
    )
    assert "<tools>\n" in tokenizer.decode(rendered.ids)
    # What is no control token of the template, but a token all the same, is one wherever it is written.
    assert rendered.ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 2


def learned_text(tokenizer: Any, rendered: Rendered) -> str:
    return str(
        tokenizer.decode([token for token, wanted in zip(rendered.ids, rendered.learned, strict=True) if wanted])
    )


# --- against the models' own templates ---------------------------------------------------------------------


@pytest.mark.parametrize("name", VENDORS)
@FEW
@given(data=st.data())
def test_a_family_writes_what_its_models_write(name: str, data: st.DataObject) -> None:
    tools = FAMILIES[name].extends_with_tools is not None and data.draw(st.booleans())
    chat = data.draw(tool_chats() if tools else chats(system=name not in SYSTEMLESS))
    tokenizer = with_template(name, vendor(VENDORS[name]))
    theirs = tokenizer.apply_chat_template(as_dicts(chat.messages), tools=list(chat.tools) or None, tokenize=False)
    ours = family(name).render(chat, 1)
    assert ours.ids == tokenizer(theirs, add_special_tokens=False)["input_ids"]
    assert own(tokenizer).family == name
    assert own(tokenizer).render(chat, 1) == ours


def test_smollm2_writes_what_the_model_writes(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    for messages in (TURNS, (SYSTEM, *TURNS)):
        ours = family("smollm2", tokenizer).render(Chat(messages), 1)
        assert ours.ids == tokenizer.apply_chat_template(as_dicts(messages), return_dict=True)["input_ids"]
        assert Renderer(tokenizer, RenderOptions()).render(Chat(messages), 1) == ours
    assert Renderer(tokenizer, RenderOptions()).family == "smollm2"


@pytest.mark.parametrize("name", ["command-r", "gemma", "gemma3", "llama3", "phi3"])
@FEW
@given(data=st.data())
def test_masks_are_those_that_trl_trains_with(name: str, data: st.DataObject) -> None:
    chat = data.draw(chats(system=name not in SYSTEMLESS))
    tokenizer = with_template(name, vendor(f"{VENDORS[name]}_training"))
    theirs = tokenizer.apply_chat_template(
        as_dicts(chat.messages), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ours = family(name).render(chat, 1)
    assert ours.ids == theirs["input_ids"]
    # TRL also marks the white space (and Phi 3's EOS) behind an end-of-turn token, which a model never comes to write.
    ends = {tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].tokens}
    mask: list[bool] = []
    over = False
    for token, marked in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True):
        mask.append(bool(marked) and not over)
        over = bool(marked) and (over or token in ends)
    assert ours.learned == mask


@pytest.mark.parametrize("name", VENDORS)
def test_turns_found_without_a_family_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic road, by prompts and marks, on templates whose masks are known."""
    if name == "deepseek":
        pytest.skip("its template prompts with <think>, which answers do not have: only the family knows their places")
    tokenizer = with_template(name, vendor(VENDORS[name]))
    known = own(tokenizer)
    monkeypatch.setattr("core.train.render.setup.FAMILIES", {})
    alone = Renderer(tokenizer, RenderOptions())
    assert (known.family, alone.family) == (name, None)
    messages = TURNS if name in SYSTEMLESS else (SYSTEM, *TURNS)
    for chat in (Chat(messages), Chat(messages[:-2])):
        assert alone.render(chat, 1) == known.render(chat, 1)


def test_a_template_like_a_family_is_asked_itself() -> None:
    """A model whose template differs from its family's in one place gets its own text and a right mask."""
    source = vendor("llama3").replace(
        "'<|start_header_id|>' + message['role']",
        "'<|start_header_id|>' + message['role'] + ('!' if 'red' in message['content'] else '')",
    )
    tokenizer = with_template("llama3", source)
    renderer = Renderer(tokenizer, RenderOptions())
    assert renderer.family == "llama3"
    rendered = renderer.render(Chat(TURNS), 1)
    assert "user!<|end_header_id|>" in tokenizer.decode(rendered.ids)
    assert learned_text(tokenizer, rendered) == "It is 2.<|eot_id|>blue<|eot_id|>"


# --- what a family refuses ---------------------------------------------------------------------------------


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match=r"lacks <\|start_header_id\|>") as error:
        family("llama3", family_tokenizer("chatml"))
    assert error.value.field == "data.rendering.name"
    with pytest.raises(SpecError, match="a BOS token"):
        family("llama2", family_tokenizer("chatml"))


@pytest.mark.parametrize("name", [name for name, found in FAMILIES.items() if found.extends_with_tools is None])
def test_what_has_no_form_is_refused_and_not_left_out(name: str) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("1", "add", {}),))
    for chat in (Chat(TURNS, (TOOLS[0],)), Chat((TURNS[0], call))):
        with pytest.raises(DataError, match="refuses this chat"):
            family(name).render(chat, 7)


@pytest.mark.parametrize("name", ALTERNATING)
def test_two_questions_in_a_row_are_refused_where_the_models_do(name: str) -> None:
    with pytest.raises(DataError, match="in turns"):
        family(name).render(Chat((TURNS[0], *TURNS)), 1)


def test_the_tuned_model_carries_the_template_it_was_trained_with() -> None:
    tokenizer = copy.copy(family_tokenizer("chatml"))
    assert tokenizer.chat_template is None
    renderer = family("chatml", tokenizer)
    tokenizer.chat_template = renderer.saved_template()
    assert "generation %}" not in tokenizer.chat_template.replace("endgeneration", "generation")
    assert tokenizer.apply_chat_template(as_dicts(TURNS), return_dict=True)["input_ids"] == (
        renderer.render(Chat(TURNS), 1).ids
    )
    assert Renderer(tokenizer, RenderOptions()).saved_template() is None
