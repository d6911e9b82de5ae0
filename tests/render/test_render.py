"""Golden tokens: what is learned from each kind of row, on the real SmolLM2 tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from core.data.rows import Chat, Instruction, Message, PromptCompletion, Text
from core.errors import DataError
from core.spec.axes.rendering import ModelTemplate, Rendering
from core.train.data.reader import Numbered
from core.train.data.tokenise.whole import tokenise
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered

START, END = 1, 2  # <|im_start|> and <|im_end|> of SmolLM2, which are its BOS and its EOS
PAD = END


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def bare(smollm2_dir: Path) -> Any:
    """A base model's tokenizer: no chat template, and a BOS before every text, as Llama's has."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    return tokenizer


def render(tokenizer: Any, row: Any, *, all_tokens: bool = False, rendering: Rendering = ModelTemplate()) -> Rendered:
    return Renderer(tokenizer, RenderOptions("all" if all_tokens else "completions", rendering)).render(row, 1)


def learned(tokenizer: Any, rendered: Rendered) -> str:
    pairs = zip(rendered.ids, rendered.learned, strict=True)
    return str(tokenizer.decode([token for token, wanted in pairs if wanted]))


def chat(*turns: str) -> Chat:
    roles = ("user", "assistant")
    return Chat(tuple(Message(roles[at % 2], turn) for at, turn in enumerate(turns)))


def test_the_tokenizer_is_the_trap_we_mean(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (START, END, PAD)


def test_chat_golden_tokens(tokenizer: Any) -> None:
    rendered = render(tokenizer, Chat((Message("system", "S"), Message("user", "hi"), Message("assistant", "yes"))))
    assert rendered.ids == [1, 9690, 198, 67, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198, 10407, 2, 198]
    assert [at for at, wanted in enumerate(rendered.learned) if wanted] == [16, 17]
    assert learned(tokenizer, rendered) == "yes<|im_end|>"


def test_every_assistant_turn_is_learned_with_its_end(tokenizer: Any) -> None:
    rendered = render(tokenizer, chat("one?", "two", "three?", "four five"))
    assert learned(tokenizer, rendered) == "two<|im_end|>four five<|im_end|>"
    assert (
        rendered.ids
        == tokenizer.apply_chat_template(
            [
                {"role": r, "content": c}
                for r, c in zip(["user", "assistant"] * 2, ["one?", "two", "three?", "four five"], strict=True)
            ],
            return_dict=True,
        )["input_ids"]
    )


def test_generation_marks_give_the_same_mask(tokenizer: Any, smollm2_dir: Path) -> None:
    marked = AutoTokenizer.from_pretrained(smollm2_dir)
    marked.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    )
    plain = AutoTokenizer.from_pretrained(smollm2_dir)
    plain.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    row = chat("one?", "two", "three?", "four")
    assert render(marked, row) == render(plain, row)


def test_a_template_that_rewrites_history_is_refused(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(DataError, match="differently once there is an answer"):
        render(tokenizer, chat("a", "b"))


def test_a_template_that_refuses_is_heard(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(DataError, match="no system here"):
        render(tokenizer, chat("a", "b"))


def test_a_template_without_end_of_turn_gets_eos(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    rendered = render(tokenizer, chat("a", "b"))
    assert learned(tokenizer, rendered) == " b\n<|im_end|>"


JOINED = ModelTemplate(pairs="joined")
"""As TRL tokenises plain strings."""


def test_prompt_completion_golden_tokens(tokenizer: Any) -> None:
    rendered = render(tokenizer, PromptCompletion("Two plus two is", " four"), rendering=JOINED)
    assert rendered.ids[-1] == END
    assert learned(tokenizer, rendered) == " four<|im_end|>"
    assert not rendered.cut_prompt
    assert START not in rendered.ids  # strings get no template (as in TRL), and SmolLM2 adds no BOS to a text


def test_a_token_across_the_border_is_learned_and_counted(tokenizer: Any) -> None:
    rendered = render(tokenizer, PromptCompletion("the cat sat on the ma", "t"), rendering=JOINED)
    assert rendered.cut_prompt
    assert learned(tokenizer, rendered).endswith("mat<|im_end|>")


def test_exactly_one_bos(bare: Any) -> None:
    bos = bare.bos_token_id
    for row in (
        PromptCompletion("a b", " c"),
        PromptCompletion("<|endoftext|>a b", " c"),
        Text("a b"),
        Text("<|endoftext|>a b"),
    ):
        ids = render(bare, row).ids
        assert ids.count(bos) == 1 and ids[0] == bos, row
        assert ids.count(END) == 1 and ids[-1] == END, row
    templated = bare.__class__.from_pretrained(bare.name_or_path)
    templated.backend_tokenizer.post_processor = bare.backend_tokenizer.post_processor
    templated.add_special_tokens({"bos_token": "<|endoftext|>"})
    templated.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    ids = render(templated, chat("a", "b")).ids
    assert ids.count(bos) == 1 and ids[0] == bos


@pytest.mark.parametrize("given", ["", "red, blue"])
def test_alpaca_keeps_the_instruction(bare: Any, tokenizer: Any, given: str) -> None:
    row = Instruction("Name a colour", given, "red")
    text = bare.decode(render(bare, row).ids)
    assert "### Instruction:\nName a colour" in text
    assert ("### Input:\nred, blue" in text) == bool(given)
    assert learned(bare, render(bare, row)) == "red<|im_end|>"
    as_chat = render(tokenizer, row)
    assert "<|im_start|>user\nName a colour" in tokenizer.decode(as_chat.ids)
    assert learned(tokenizer, as_chat) == "red<|im_end|>"


def test_text_learns_all_but_the_first_token_and_eos_once(tokenizer: Any) -> None:
    for text in ("one two three", "one two three<|im_end|>"):
        rendered = render(tokenizer, Text(text), all_tokens=True)
        assert rendered.ids.count(END) == 1
        assert rendered.learned == [False] + [True] * (len(rendered.ids) - 1)


def test_chats_need_a_template(bare: Any) -> None:
    with pytest.raises(DataError, match="no chat template"):
        render(bare, chat("a", "b"))


def test_eos_is_learned_and_padding_is_not_though_they_are_one_token(tokenizer: Any) -> None:
    rows = [Numbered(1, chat("hi", "yes")), Numbered(2, chat("a much longer question than that", "no no no"))]
    dataset, _ = tokenise(rows, Renderer(tokenizer, RenderOptions()), 128)
    batch = dataset.collate([0, 1], PAD)
    short = batch.lengths[0]
    assert batch.input_ids[0, short:].eq(PAD).all() and batch.labels[0, short:].eq(-100).all()
    assert (batch.labels == END).sum() == 2
    assert batch.label_tokens == int((batch.labels != -100).sum())


def test_truncation_is_counted_and_rows_with_nothing_left_are_dropped(tokenizer: Any) -> None:
    rows = [Numbered(1, chat("hi", "yes")), Numbered(2, chat("hi", "yes " * 50)), Numbered(3, chat("hi " * 60, "yes"))]
    dataset, report = tokenise(rows, Renderer(tokenizer, RenderOptions()), 40)
    assert (len(dataset), report.truncated, report.dropped) == (2, 2, 1)
    with pytest.raises(DataError, match=r"training\.max_length = 8"):
        tokenise(rows, Renderer(tokenizer, RenderOptions()), 8)
