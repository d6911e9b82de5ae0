"""What goes into a row comes out of its text, or the row is refused: every field through every template.

The oracle knows nothing of how the renderer checks: each field of a row is a word that stands nowhere else, and is
looked for in the decoded tokens.
"""

from __future__ import annotations

import copy
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from core.data.rows import Chat, Labelled, Message, Preference, PromptOnly, ToolCall
from core.errors import DataError
from core.spec.axes.rendering import FamilyTemplate, GivenTemplate, ModelTemplate
from core.train.render.families import FAMILIES
from core.train.render.options import LossOn, RenderOptions
from core.train.render.renderer import Renderer
from tests.support.family_tokenizers import family_tokenizer

REAL = sorted(
    entry.name.removesuffix(".jinja")
    for entry in (resources.files("trl") / "chat_templates").iterdir()
    if entry.name.endswith(".jinja")
)
"""Templates of models, as TRL carries them."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "toolname",
        "description": "tooldescription",
        "parameters": {
            "type": "object",
            "properties": {
                "toolproperty": {"type": "string", "description": "propertydescription", "enum": ["enumvalue"]},
                "outer": {"type": "object", "properties": {"innerproperty": {"type": "number", "description": "deep"}}},
            },
        },
    },
}
CALLS = (
    ToolCall("aaaaaaaa1", "callname", {"argumentkey": "argumentvalue", "list": ["listvalue", {"deepkey": 7654321}]}),
    ToolCall("aaaaaaaa2", "secondname", {"flag": True, "nothing": None}),
)
ASK, ANSWER = Message("user", "asking"), Message("assistant", "answering")
CALLED = Message("assistant", "", tool_calls=CALLS)
RESULTS = (Message("tool", "result1", tool_call_id="aaaaaaaa1"), Message("tool", "result2", tool_call_id="aaaaaaaa2"))
TOOL_WORDS = (
    *("toolname", "tooldescription", "toolproperty", "propertydescription", "enumvalue", "outer", "innerproperty"),
    *("deep", "callname", "argumentkey", "argumentvalue", "list", "listvalue", "deepkey", "7654321"),
    *("secondname", "flag", "nothing"),
)


class Case(NamedTuple):
    chat: Chat
    words: tuple[str, ...]
    """What must come out."""


CASES: dict[str, Case] = {
    "plain": Case(Chat((ASK, ANSWER)), ("asking", "answering")),
    "system": Case(Chat((Message("system", "systemtext"), ASK, ANSWER)), ("systemtext", "asking", "answering")),
    "developer": Case(Chat((Message("developer", "developertext"), ASK, ANSWER)), ("developertext",)),
    "earlier turns": Case(
        Chat((Message("user", "first"), Message("assistant", "earlier"), ASK, ANSWER)), ("first", "earlier")
    ),
    "two questions": Case(Chat((Message("user", "first"), ASK, ANSWER)), ("first", "asking")),
    "name": Case(Chat((Message("user", "asking", name="username"), ANSWER)), ("username",)),
    "name of an assistant": Case(Chat((ASK, Message("assistant", "x", name="assistantname"))), ("assistantname",)),
    "reasoning": Case(Chat((ASK, Message("assistant", "answering", reasoning="thought"))), ("thought", "answering")),
    "reasoning in the content": Case(
        Chat((ASK, Message("assistant", "<think>\nthought\n</think>\n\nanswering"))), ("thought", "answering")
    ),
    "reasoning of two answers": Case(
        Chat(
            (
                *(ASK, Message("assistant", "x", reasoning="firstthought")),
                *(ASK, Message("assistant", "y", reasoning="secondthought")),
            )
        ),
        ("firstthought", "secondthought"),
    ),
    "tools": Case(Chat((ASK, ANSWER), (TOOL,)), TOOL_WORDS[:8]),
    "calls": Case(Chat((ASK, CALLED)), TOOL_WORDS[8:]),
    "tools, calls, results": Case(
        Chat((ASK, CALLED, *RESULTS, ANSWER), (TOOL,)), (*TOOL_WORDS, "result1", "result2", "answering")
    ),
    "content beside calls": Case(
        Chat((ASK, Message("assistant", "besides", tool_calls=CALLS[:1]), RESULTS[0], ANSWER)),
        ("besides", "callname", "result1"),
    ),
    "reasoning before a call": Case(
        Chat((ASK, Message("assistant", "", tool_calls=CALLS[:1], reasoning="thought"), RESULTS[0], ANSWER)),
        ("thought", "callname"),
    ),
    "a result's own name": Case(
        Chat((ASK, CALLED, Message("tool", "result1", tool_call_id="aaaaaaaa1", name="othername"), ANSWER)),
        ("othername", "result1"),
    ),
    "results in another order": Case(Chat((ASK, CALLED, RESULTS[1], RESULTS[0], ANSWER)), ("aaaaaaaa1", "aaaaaaaa2")),
}


@cache
def of_family(name: str, loss_on: LossOn = "completions") -> Renderer:
    return Renderer(family_tokenizer(name), RenderOptions(loss_on, FamilyTemplate(name=name)))


@cache
def of_model(name: str) -> Renderer:
    tokenizer = copy.deepcopy(family_tokenizer("chatml"))  # a shallow one shares its special tokens
    tokenizer.bos_token = "<unk>"
    tokenizer.chat_template = (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return Renderer(tokenizer, RenderOptions())


def given(source: str) -> Renderer:
    return Renderer(family_tokenizer("chatml"), RenderOptions(rendering=GivenTemplate(template=source)))


def taken(found: Renderer) -> set[str]:
    """The cases that are rendered, each held to its words; all others are refused in words."""
    names = set()
    for name, case in CASES.items():
        try:
            rendered = found.render(case.chat, 4)
        except DataError as error:
            assert error.field is not None and error.field.startswith("line 4"), error.message
            continue
        text = found.tokenizer.decode(rendered.ids)
        lost = [word for word in case.words if word not in text]
        assert not lost, (name, lost, text)
        assert any(rendered.learned)
        names.add(name)
    return names


TOOLS_TAKEN = {"tools", "calls", "tools, calls, results", "content beside calls"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_through_every_family(name: str) -> None:
    names = taken(of_family(name))
    assert "plain" in names
    assert names & TOOLS_TAKEN == (set() if FAMILIES[name].extends_with_tools is None else TOOLS_TAKEN)
    assert ("reasoning" in names) == FAMILIES[name].reasoning
    assert not names & {"name", "name of an assistant", "a result's own name", "results in another order"}
    assert "reasoning of two answers" not in names  # Qwen3 writes those of the last answer alone


@pytest.mark.parametrize("name", REAL)
def test_every_field_through_templates_of_models(name: str) -> None:
    names = taken(of_model(name))
    # Templates of models that see take content by parts, and iterate over the letters of a text: nothing comes out.
    # Nemotron writes thoughts into every answer, but prompts with their beginning: without marks no turn can be told.
    asked = name.startswith("nemotron") and not name.endswith("_training")
    assert ("plain" in names) == (not asked and not name.startswith(("idefics3", "smolvlm", "llava_next")))
    if name.startswith(("llama3_training", "phi3", "deepseek_r1", "qwen2_5_vl")) or name == "llama3":
        assert not names & TOOLS_TAKEN


def test_the_models_own_template_is_not_a_way_around_its_family(smollm2_dir: Path) -> None:
    """SmolLM2's knows role and content alone, and would write an empty answer in place of a call."""
    found = Renderer(AutoTokenizer.from_pretrained(smollm2_dir), RenderOptions(rendering=ModelTemplate()))
    assert found.family == "smollm2"
    assert taken(found) == {
        "plain", "system", "developer", "earlier turns", "two questions", "reasoning in the content",
    }  # fmt: skip
    for name, field in (
        ("calls", "messages[1].tool_calls[0].function.name"),
        ("tools", "tools[0].function.name"),
        ("reasoning", "messages[1].reasoning_content"),
        ("name", "messages[0].name"),
    ):
        with pytest.raises(DataError) as error:
            found.render(CASES[name].chat, 7)
        assert (error.value.code, error.value.field) == ("not_in_template", f"line 7: {field}")
        if name != "name":
            assert "set data.rendering to " in error.value.message and "`qwen3`" in error.value.message
    with pytest.raises(DataError, match=r"no form for tools; set data.rendering to `qwen2.5` or `qwen3`"):
        Renderer(found.tokenizer, RenderOptions(rendering=FamilyTemplate(name="smollm2"))).render(
            CASES["calls"].chat, 1
        )


def test_the_way_out_is_one(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    for family in ("qwen2.5", "qwen3"):
        found = Renderer(tokenizer, RenderOptions(rendering=FamilyTemplate(name=family)))  # type: ignore[arg-type]
        assert taken(found) >= TOOLS_TAKEN


def test_words_that_stand_elsewhere_prove_nothing() -> None:
    """Every word of the name is in the content, which is written; the name is not."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    chat = Chat((Message("user", "Bob asks", name="Bob"), Message("assistant", "yes")))
    with pytest.raises(DataError, match="has no place for `name`"):
        given(source).render(chat, 1)
    again = Chat((Message("user", "yes"), Message("assistant", "yes"), Message("user", "a"), Message("assistant", "b")))
    with pytest.raises(DataError, match="leaves out some of this content"):
        given("{% for m in messages[1:] %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}").render(again, 1)


@pytest.mark.parametrize(
    ("source", "case", "words"),
    [
        ("{{ m.role }}:{{ m.content[:3] }}", "plain", "leaves out some of this content"),
        ("{{ m.role }}:{{ m.content if m.role != 'system' }}", "system", "leaves out some of this content"),
        ("{{ 'A' if m.role == 'assistant' else 'Q' }}:{{ m.content }}", "system", "writes a `system` turn as"),
        (
            "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
            "calls",
            "this part of a tool call",
        ),
        (
            "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v if v is not number }}{% endfor %}{% endfor %}",
            "calls",
            "this part of a tool call",
        ),
        ("{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}", "tools", "this part of `tools`"),
    ],
)
def test_what_a_given_template_drops_is_refused(source: str, case: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        given("{% for m in messages %}" + source + "<|im_end|>{% endfor %}").render(CASES[case].chat, 1)


def test_a_given_template_with_a_place_for_all() -> None:
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }} {{ m.name or '' }}:"
        "{{ m.reasoning_content or '' }} {{ m.content }} {{ m.tool_calls | tojson if m.tool_calls }} "
        "{{ m.tool_call_id or '' }}<|im_end|>{% endfor %}"
    )
    assert taken(given(source)) == set(CASES)


def test_what_is_not_learned_may_lose_its_reasoning() -> None:
    first, last = Message("assistant", "x", reasoning="one"), Message("assistant", "y", reasoning="two")
    for loss_on, weight in (("last", None), ("completions", 0.0)):
        chat = Chat((ASK, Message("assistant", "x", weight=weight, reasoning="one"), ASK, last))
        text = family_tokenizer("qwen3").decode(of_family("qwen3", loss_on).render(chat, 1).ids)  # type: ignore[arg-type]
        assert "two" in text and "one" not in text
    with pytest.raises(DataError, match="leaves out the reasoning"):
        of_family("qwen3").render(Chat((ASK, first, ASK, last)), 1)


def test_other_stages_are_held_to_it_too(smollm2_dir: Path) -> None:
    found = Renderer(AutoTokenizer.from_pretrained(smollm2_dir), RenderOptions())
    for render, row in (
        (found.render_pair, Preference((ASK,), (ANSWER,), (CALLED,))),
        (found.render_labelled, Labelled((ASK,), (ANSWER,), True, (TOOL,))),
        (found.render_prompt, PromptOnly((ASK,), tools=(TOOL,))),
        (found.render_prompt, PromptOnly((Message("user", "asking", name="username"),))),
    ):
        with pytest.raises(DataError) as error:
            render(row, 1)  # type: ignore[operator]
        assert error.value.code == "not_in_template"


def test_the_system_prompt_of_a_job_must_come_out() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    rendering = GivenTemplate(template=source, system_prompt="Be brief.")
    with pytest.raises(DataError) as error:
        Renderer(family_tokenizer("chatml"), RenderOptions(rendering=rendering)).render(CASES["plain"].chat, 1)
    assert (error.value.code, error.value.field) == ("not_in_template", "data.rendering.system_prompt")
