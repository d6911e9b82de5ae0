"""Pairs of strings to tokens: each way on the real SmolLM2 tokenizer, and what a tuned model is asked with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.data.rows import Instruction, Labelled, Preference, PromptCompletion, PromptOnly
from core.errors import DataError, SpecError
from core.spec.axes.data import RowFormat
from core.spec.axes.pairs import WAYS, Way, asked, bordered, told
from core.spec.axes.rendering import ModelTemplate
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from tests.support.trainer import ROOT

END = "<|im_end|>"
APART: tuple[Way, ...] = ("chat", "newline", "space", "apart")


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def bare(smollm2_dir: Path) -> Any:
    """As a base model's: without a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer.chat_template = None
    return tokenizer


def intents() -> list[PromptCompletion]:
    """Real rows: what people say to their machine, and what they mean."""
    found = []
    for name in ("train", "heldout"):
        for line in (ROOT / "examples" / "voice-intents" / f"{name}.jsonl").read_text().splitlines():
            words = {one["role"]: one["content"] for one in json.loads(line)["messages"]}
            found.append(PromptCompletion(words["user"], words["assistant"]))
    return found


def renderer(tokenizer: Any, pairs: str = "auto", row_format: RowFormat = "prompt_completion") -> Renderer:
    rendering = ModelTemplate(pairs=pairs)  # type: ignore[arg-type]
    return Renderer(tokenizer, RenderOptions(rendering=rendering, row_format=row_format))


def question(tokenizer: Any, way: Way, prompt: str) -> list[int]:
    """As somebody asks who has nothing of eft."""
    if way == "chat":
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(asked(way, prompt))["input_ids"])


@pytest.mark.parametrize("way", APART)
def test_training_shows_the_prompt_that_is_asked(tokenizer: Any, way: Way) -> None:
    """Of every row what is not learned is, token for token, what the tuned model is given for its prompt."""
    found = renderer(tokenizer, way)
    rows = intents()
    for row, rendered in zip(rows, found.render_many([(row, 1) for row in rows]), strict=True):
        start = rendered.learned.index(True)
        assert rendered.ids[:start] == question(tokenizer, way, row.prompt)
        assert rendered.ids[:start] == found.render_prompt(PromptOnly(row.prompt), 1).ids
        assert rendered.ids[:start] == found.render_asked(row.prompt, 1).ids
        written = [token for token, wanted in zip(rendered.ids, rendered.learned, strict=True) if wanted]
        assert tokenizer.decode(written) == bordered(way, row.prompt, row.completion)[1] + END
        assert not rendered.cut_prompt


def test_joined_rows_show_another_prompt(tokenizer: Any) -> None:
    """The fault that the other ways do not have: it is there in these rows, and it is counted."""
    found = renderer(tokenizer, "joined")
    rows = intents()
    cut = [found.render(row, 1).cut_prompt for row in rows]
    assert sum(cut) > len(rows) / 8
    for row, is_cut in zip(rows, cut, strict=True):
        rendered = found.render(row, 1)
        asked_with = question(tokenizer, "joined", row.prompt)
        assert (rendered.ids[: len(asked_with)] != asked_with) == is_cut


def test_a_chat_pair_whose_answer_would_merge_with_the_header(tokenizer: Any) -> None:
    row = PromptCompletion("x", "\n\nyes")
    rendered = renderer(tokenizer, "chat").render(row, 1)
    start = rendered.learned.index(True)
    assert rendered.ids[:start] == question(tokenizer, "chat", "x")
    assert not rendered.cut_prompt
    learned = [token for token, wanted in zip(rendered.ids, rendered.learned, strict=True) if wanted]
    assert tokenizer.decode(learned) == "\n\nyes" + END
    spelled = renderer(tokenizer, "chat").render(PromptCompletion(f"a {END} b", "\n\nyes"), 1)
    assert spelled.ids.count(tokenizer.eos_token_id) == rendered.ids.count(tokenizer.eos_token_id)
    assert not spelled.cut_prompt


def test_the_default_is_the_model_s(tokenizer: Any, bare: Any) -> None:
    assert renderer(tokenizer).pairs == "chat"
    assert renderer(bare).pairs == "newline"
    assert renderer(bare).describe()["pairs"] == "newline"
    with pytest.raises(SpecError, match="needs a chat template") as error:
        renderer(bare, "chat")
    assert error.value.field == "data.rendering.pairs"
    for way in WAYS:
        assert told(way).endswith(".")
    assert "chat template" in told("auto") and "line break" in told("auto")


@pytest.mark.parametrize("tail", ["", " ", "\n", "\t"])
def test_a_line_break_follows_a_prompt_that_ends_in_no_white_space(bare: Any, tail: str) -> None:
    rendered = renderer(bare).render(PromptCompletion(f"turn it up{tail}", "volume_up"), 1)
    assert bare.decode(rendered.ids) == f"turn it up{tail or chr(10)}volume_up{END}"


def test_a_space_precedes_a_completion_once(bare: Any) -> None:
    for completion in ("yes", " yes"):
        assert (
            bare.decode(renderer(bare, "space").render(PromptCompletion("go?", completion), 1).ids) == f"go? yes{END}"
        )


def test_alpaca_s_prompt_is_what_is_asked(bare: Any) -> None:
    """An answer that begins with a line break merges with the prompt's last one, where both are one string."""
    row = Instruction("Name a colour", "", "\n\nred")
    apart, joined = renderer(bare, row_format="instruction"), renderer(bare, "joined", "instruction")
    rendered = apart.render(row, 1)
    assert rendered.ids[: rendered.learned.index(True)] == apart.render_asked("Name a colour", 1).ids
    assert joined.render(row, 1).cut_prompt and not rendered.cut_prompt


def test_preferences_and_labels_take_the_same_way(bare: Any, tokenizer: Any) -> None:
    for found, prompt in ((renderer(bare), "q\n"), (renderer(tokenizer), None)):
        chosen, rejected = found.render_pair(Preference("q", "good", "bad"), 1)
        labelled = found.render_labelled(Labelled("q", "good", True), 1)
        before = found.render_prompt(PromptOnly("q"), 1).ids
        assert labelled == chosen
        assert chosen.ids[: chosen.learned.index(True)] == before == rejected.ids[: rejected.learned.index(True)]
        assert prompt is None or bare.decode(before) == prompt


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PromptCompletion("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yes"), "begins with the control"),
        (PromptCompletion("hi<|im_end|>\n<|im_start|>assistant", "yes"), "ends as the chat template ends one"),
        (PromptCompletion("hi", "yes<|im_end|>"), "ends with the control token"),
    ],
)
def test_a_pair_that_is_a_rendered_chat_is_refused(tokenizer: Any, row: PromptCompletion, words: str) -> None:
    """Silently wrapped once more it would train on a prompt that nobody sends."""
    with pytest.raises(DataError, match=words) as error:
        renderer(tokenizer).render(row, 7)
    assert error.value.field == "line 7" and "data.rendering.pairs" in error.value.message
    taken = renderer(tokenizer, "apart").render(row, 7)
    assert tokenizer.decode(taken.ids) == row.prompt + row.completion.removesuffix(END) + END
    as_text = renderer(tokenizer, "chat").render(row, 7)
    assert tokenizer.decode(as_text.ids).count(row.prompt) == 1


def test_a_control_token_in_the_middle_of_a_pair_is_text(tokenizer: Any) -> None:
    rendered = renderer(tokenizer).render(PromptCompletion(f"what is {END}?", "a token"), 1)
    assert rendered.ids.count(tokenizer.eos_token_id) == 3  # of system, user and answer
