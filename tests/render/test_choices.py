"""What a job can choose: which turns are learned, which template, which system prompt; and the rows of other stages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from core.data.rows import (
    Chat,
    Instruction,
    Labelled,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Text,
    ToolCall,
)
from core.errors import DataError, SpecError
from core.spec.axes.rendering import FamilyTemplate, GivenTemplate, ModelTemplate, Rendering
from core.spec.job import JobSpec
from core.train.render.families import FAMILIES
from core.train.render.options import LossOn, RenderOptions, loss_on_for
from core.train.render.renderer import Renderer, renderer_of
from core.train.render.strings import Rendered
from tests.support.chats import TOOLS
from tests.support.family_tokenizers import family_tokenizer

CHATML: Rendering = FamilyTemplate(name="chatml")
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def renderer(loss_on: LossOn = "completions", rendering: Rendering = CHATML, name: str = "chatml") -> Renderer:
    return Renderer(family_tokenizer(name), RenderOptions(loss_on, rendering))


def learned(rendered: Rendered, name: str = "chatml") -> str:
    wanted = [token for token, want in zip(rendered.ids, rendered.learned, strict=True) if want]
    return str(family_tokenizer(name).decode(wanted))


def text(rendered: Rendered, name: str = "chatml") -> str:
    return str(family_tokenizer(name).decode(rendered.ids))


def weighted(*weights: float | None) -> Chat:
    turns: list[Message] = []
    for at, weight in enumerate(weights):
        turns += [Message("user", f"q{at}"), Message("assistant", f"a{at}", weight=weight)]
    return Chat(tuple(turns))


# --- which turns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rendering", [CHATML, GivenTemplate(template=PLAIN)], ids=["marked", "found"])
@pytest.mark.parametrize(
    ("loss_on", "weights", "expected"),
    [
        ("completions", (None, None, None), "a0<|im_end|>a1<|im_end|>a2<|im_end|>"),
        ("completions", (0, None, 1), "a1<|im_end|>a2<|im_end|>"),
        ("completions", (0, 0), ""),
        ("last", (None, None, None), "a2<|im_end|>"),
        ("turns", (0, 1, None), "a1<|im_end|>"),
        ("turns", (1, 0, 1), "a0<|im_end|>a2<|im_end|>"),
        ("turns", (0, 0), ""),
    ],
)
def test_turns_chosen(rendering: Rendering, loss_on: LossOn, weights: tuple[float | None, ...], expected: str) -> None:
    assert learned(renderer(loss_on, rendering).render(weighted(*weights), 1)) == expected


def test_all_learns_all_but_the_first_token() -> None:
    rendered = renderer("all").render(weighted(None, 0), 1)
    assert rendered.learned == [False] + [True] * (len(rendered.ids) - 1)


def test_turns_without_a_weight_is_a_fault_of_the_row() -> None:
    with pytest.raises(DataError, match="no assistant turn of this chat has a weight") as error:
        renderer("turns").render(weighted(None, None), 12)
    assert error.value.field == "line 12: messages"


@pytest.mark.parametrize("loss_on", ["last", "turns", "completions"])
def test_marks_that_are_no_turns_cannot_be_chosen_from(loss_on: LossOn) -> None:
    """One block around several answers: all of it, or a refusal; never another turn than was meant."""
    source = "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    found = renderer(loss_on, GivenTemplate(template=source))
    chat = Chat((*weighted(1, 0).messages, Message("user", "?")))
    with pytest.raises(DataError, match="single ones cannot be chosen"):
        found.render(chat, 1)


def test_a_merge_across_the_prompt_is_told() -> None:
    rendered = renderer().render(Chat((Message("user", "x"), Message("assistant", "\n\nyes"))), 1)
    # "\n" of the header and the answer's may be one token, of which the prompt has only a part.
    assert learned(rendered).strip() == "yes<|im_end|>"
    whole = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n\n\nyes<|im_end|>\n"
    assert rendered.ids == family_tokenizer("chatml")(whole, add_special_tokens=False)["input_ids"]
    prompt = family_tokenizer("chatml")(whole[: whole.index("\n\n\nyes") + 1], add_special_tokens=False)["input_ids"]
    assert rendered.cut_prompt == (rendered.ids[: len(prompt)] != prompt)


def test_loss_on_by_format() -> None:
    assert loss_on_for(None, "text") == "all"
    assert loss_on_for(None, "messages") == "completions"
    assert loss_on_for("turns", "sharegpt") == "turns"
    for chosen, row_format in (("completions", "text"), ("last", "text"), ("turns", "instruction")):
        with pytest.raises(SpecError):
            loss_on_for(chosen, row_format)  # type: ignore[arg-type]


# --- tools -------------------------------------------------------------------------------------------------


def test_tool_calls_are_learned_and_results_are_not() -> None:
    call = ToolCall("1", "add", {"a": 1})
    chat = Chat(
        (
            Message("user", "1?"),
            Message("assistant", "Wait.", tool_calls=(call,), weight=1),
            Message("tool", "2", tool_call_id="1"),
            Message("assistant", "2.", weight=0),
        ),
        TOOLS,
    )
    found = renderer(rendering=FamilyTemplate(name="qwen2.5"), name="qwen2.5")
    assert learned(found.render(chat, 1), "qwen2.5") == (
        'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    # The same from the same template without its marks.
    source = FAMILIES["qwen2.5"].source
    for tag in ("{%- generation %}", "{%- endgeneration %}", "{% endgeneration %}"):
        source = source.replace(tag, "")
    tokenizer = copy.copy(family_tokenizer("qwen2.5"))
    alone = Renderer(tokenizer, RenderOptions(rendering=GivenTemplate(template=source)))
    assert alone.render(chat, 1).ids == found.render(chat, 1).ids
    assert learned(alone.render(chat, 1), "qwen2.5") == learned(found.render(chat, 1), "qwen2.5")


# --- system prompts and roles ------------------------------------------------------------------------------


def test_a_system_prompt_stands_where_a_chat_has_none() -> None:
    found = renderer(rendering=FamilyTemplate(name="chatml", system_prompt="Be brief."))
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert text(found.render(weighted(None), 1)).startswith(begin)
    assert text(found.render(Instruction("a", "", "b"), 1)).startswith(begin)
    own = Chat((Message("system", "Mine."), *weighted(None).messages))
    assert text(found.render(own, 1)).startswith("<|im_start|>system\nMine.<|im_end|>")
    last = Renderer(found.tokenizer, RenderOptions("turns", found.options.rendering))
    assert learned(last.render(weighted(0, 1), 1)) == "a1<|im_end|>"  # turns are counted in the row, not behind it
    with pytest.raises(SpecError, match="no chat template that a system prompt could go into"):
        Renderer(family_tokenizer("chatml"), RenderOptions(rendering=ModelTemplate(system_prompt="x")))


def test_developer_is_system_where_a_template_has_no_such_role() -> None:
    chat = Chat((Message("developer", "D"), *weighted(None).messages))
    assert text(renderer().render(chat, 1)).startswith("<|im_start|>system\nD<|im_end|>")
    source = "{# developer #}" + PLAIN
    assert text(renderer(rendering=GivenTemplate(template=source)).render(chat, 1)).startswith(
        "<|im_start|>developer\nD<|im_end|>"
    )


def test_arguments_for_the_template() -> None:
    chat = PromptOnly((Message("user", "x"),))
    thinking, plain = (
        renderer(rendering=FamilyTemplate(name="qwen3", chat_template_kwargs=kwargs), name="qwen3").render_prompt(
            chat, 1
        )
        for kwargs in ({}, {"enable_thinking": False})
    )
    assert text(plain, "qwen3") == text(thinking, "qwen3") + "<think>\n\n</think>\n\n"


# --- given templates ---------------------------------------------------------------------------------------


def test_a_given_template_is_carried_without_its_marks() -> None:
    source = PLAIN.replace(
        "{{ '<|im_start|>' + m.role", "{%- generation -%}{{- '' -}}{% endgeneration %}{{ '<|im_start|>' + m.role"
    )
    found = renderer(rendering=GivenTemplate(template=source))
    saved = found.saved_template()
    assert saved is not None and "generation %}" not in saved and "generation -%}" not in saved
    tokenizer = copy.copy(family_tokenizer("chatml"))
    tokenizer.chat_template = saved
    messages = [message.as_dict() for message in weighted(None).messages]
    tokenizer_text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokenizer.chat_template = source
    assert tokenizer_text == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_template_that_is_none_is_told_with_its_line() -> None:
    with pytest.raises(SpecError, match="its line 2") as error:
        renderer(rendering=GivenTemplate(template="x\n{% for %}"))
    assert error.value.field == "data.rendering.template"


# --- rows of other stages ----------------------------------------------------------------------------------


def test_preferences() -> None:
    prompt = (Message("system", "S"), Message("user", "q"), Message("assistant", "earlier"), Message("user", "r"))
    row = Preference(prompt, (Message("assistant", "good"),), (Message("assistant", "bad"),))
    for loss_on in ("completions", "all"):
        chosen, rejected = renderer(loss_on).render_pair(row, 1)  # type: ignore[arg-type]
        assert (learned(chosen), learned(rejected)) == ("good<|im_end|>", "bad<|im_end|>")
        asked = renderer(loss_on).render_prompt(PromptOnly(prompt), 1)  # type: ignore[arg-type]
        assert chosen.ids[: len(asked.ids)] == rejected.ids[: len(asked.ids)] == asked.ids
        assert not any(asked.learned)
    plain = Preference("q:", " good", " bad")
    chosen, rejected = renderer().render_pair(plain, 1)
    assert (learned(chosen), learned(rejected)) == (" good<|im_end|>", " bad<|im_end|>")
    with pytest.raises(DataError, match="all messages, or all plain text"):
        renderer().render_pair(Preference(prompt, "x", "y"), 1)


def test_preferences_with_a_system_prompt() -> None:
    found = renderer(rendering=FamilyTemplate(name="chatml", system_prompt="S"))
    row = Preference(
        (Message("user", "q"), Message("assistant", "earlier"), Message("user", "r")),
        *(((Message("assistant", "good"),),) * 2),
    )
    chosen, _ = found.render_pair(row, 1)
    assert learned(chosen) == "good<|im_end|>"


def test_labelled_and_prompts() -> None:
    row = Labelled((Message("user", "q"),), (Message("assistant", "x"),), False)
    assert learned(renderer().render_labelled(row, 1)) == "x<|im_end|>"
    apart = FamilyTemplate(name="chatml", pairs="apart")
    assert text(renderer(rendering=apart).render_prompt(PromptOnly("go on: "), 1)) == "go on: "
    for row_of_another in (row, PromptOnly("x"), Preference("a", "b", "c")):
        with pytest.raises(DataError, match="nothing for stage"):
            renderer().render(row_of_another, 1)


# --- many rows, and the fingerprint ------------------------------------------------------------------------


def test_many_rows_are_those_of_one_by_one() -> None:
    rows: list[tuple[Any, int]] = [
        (weighted(None, 1), 1),
        (Text("raw <|im_end|>"), 2),
        (Chat((Message("user", "<|im_end|>"), Message("assistant", "x"))), 3),
        (PromptCompletion("a", " b"), 4),
        (Instruction("a", "b", "c"), 5),
    ]
    found = renderer()
    assert found.render_many(rows) == [found.render(row, line) for row, line in rows]
    assert found.render_many([]) == []


def test_the_fingerprint_changes_with_all_that_decides_tokens() -> None:
    tokenizer = family_tokenizer("chatml")
    templated = copy.copy(tokenizer)
    templated.chat_template = PLAIN
    prints = [
        renderer().fingerprint(),
        renderer("last").fingerprint(),
        renderer(rendering=FamilyTemplate(name="chatml", system_prompt="x")).fingerprint(),
        renderer(rendering=FamilyTemplate(name="chatml", special_tokens="real")).fingerprint(),
        renderer(rendering=FamilyTemplate(name="chatml", pairs="joined")).fingerprint(),
        renderer(rendering=GivenTemplate(template=PLAIN)).fingerprint(),
        renderer(rendering=FamilyTemplate(name="smollm2"), name="smollm2").fingerprint(),
        Renderer(tokenizer, RenderOptions()).fingerprint(),
        Renderer(templated, RenderOptions()).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert renderer().fingerprint() == prints[0]
    assert pickle.loads(pickle.dumps(renderer().options)) == renderer().options


def test_the_renderer_of_a_job() -> None:
    spec = JobSpec.model_validate(
        {"model": "a/b", "data": {"train": "file-01kar3v8x5m2h6n9qst4wyz0bc", "rendering": "chatml"}}
    )
    found = renderer_of(spec, "messages", family_tokenizer("chatml"))
    assert (found.family, found.options.loss_on) == ("chatml", "completions")
    assert found.describe()["type"] == "family"
