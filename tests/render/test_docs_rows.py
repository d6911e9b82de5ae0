"""docs/data.md says what is learned of each of its example rows: the checker takes it, and the renderer learns that."""

from __future__ import annotations

import re
from typing import Any

import pytest

from core import HOME
from core.data.checker import RowChecker
from core.data.decode import decode
from core.data.faults import Faults
from core.data.rows import Labelled, Preference, PromptOnly, Stepwise
from core.errors import DataError
from core.spec.axes.rendering import FamilyTemplate
from core.train.render.options import RenderOptions, loss_on_for
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered
from tests.support.family_tokenizers import family_tokenizer

PAGE = (HOME / "docs" / "data.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^```json\n(\{.*\})\n```\n(?:\nLearned: (.*))?", PAGE, re.MULTILINE)


def renderer(row_format: Any, family: str) -> Renderer:
    return Renderer(
        family_tokenizer(family),
        RenderOptions(loss_on_for(None, row_format), FamilyTemplate(name=family)),  # type: ignore[arg-type]
    )


def turns(rendered: Rendered) -> list[str]:
    """Each answer that is learned, less the tags around calls."""
    tokenizer = family_tokenizer("qwen2.5")
    ids = [token for token, wanted in zip(rendered.ids, rendered.learned, strict=True) if wanted]
    answers = tokenizer.decode(ids).removesuffix("<|im_end|>").split("<|im_end|>")
    return [re.sub("</?tool_call>", "", answer).strip() for answer in answers if answer]


def test_every_row_says_what_is_learned() -> None:
    assert len(ROWS) == PAGE.count("```json") > 10
    assert all(learned for _, learned in ROWS)


@pytest.mark.parametrize(("source", "learned"), ROWS)
def test_what_the_page_says_is_what_is_learned(source: str, learned: str) -> None:
    value = decode(source)
    faults = Faults()
    checker = RowChecker("kto" if "label" in value else "auto", {}, faults)
    row = checker.row(1, value)
    assert row is not None and not faults.count and not faults.ignored and checker.format is not None
    said = re.findall(r"`([^`]*)`", learned)
    found = renderer(checker.format, "qwen2.5")
    match row:
        case Preference():
            assert [answer for side in found.render_pair(row, 1) for answer in turns(side)] == said
        case Labelled():
            assert turns(found.render_labelled(row, 1)) == said
        case Stepwise():
            rendered = found.render_steps(row, 1)
            assert learned.startswith("a judgement of each step, at the separator (a line break)")
            judged = [at for at, wanted in enumerate(rendered.learned) if wanted]
            assert len(judged) == len(row.steps)
            assert all(found.tokenizer.decode(rendered.ids[at]) == "\n" for at in judged)
        case PromptOnly():
            assert learned == "nothing." and not any(found.render_prompt(row, 1).learned)
        case _ if checker.format == "text":
            rendered = found.render(row, 1)
            assert found.tokenizer.decode(rendered.ids) == f"{said[0]}<|im_end|>"
            assert rendered.learned == [False] + [True] * (len(rendered.ids) - 1)
        case _:
            assert turns(found.render(row, 1)) == said
    if "has a place for tools" in learned:
        with pytest.raises(DataError, match="no form for tools"):
            renderer(checker.format, "smollm2").render(row, 1)
