"""The extension flags of the registry, each proven: tokens(messages[:k]) is a prefix of tokens(messages), or a chat for
which it is not."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from core import HOME
from core.data.rows import Chat
from core.spec.axes.rendering import FamilyTemplate
from core.train.render.encode import Work
from core.train.render.families import FAMILIES
from core.train.render.jinja.template import Asked
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from tests.support.chats import chats, tool_chats
from tests.support.family_tokenizers import SENTENCEPIECE, family_tokenizer

PROOF = settings(max_examples=40, deadline=None, derandomize=True, database=None)
SEARCH = settings(max_examples=2000, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


@cache
def renderer(name: str, sentencepiece: bool = False) -> Renderer:
    tokenizer = family_tokenizer(name, sentencepiece=sentencepiece)
    return Renderer(tokenizer, RenderOptions(rendering=FamilyTemplate(name=name)))


def tokens(found: Renderer, chat: Chat, count: int) -> list[int]:
    """Of the first `count` messages, through the template and the tokenizer alone."""
    messages = [message.as_dict() for message in chat.messages[:count]]
    template, encoder = found._setup.template_for(1), found._encoder
    return encoder.encode(Work(template.text(Asked(messages, chat.tools, 1), messages), ())).ids


def breaks(found: Renderer, chat: Chat) -> bool:
    whole = tokens(found, chat, len(chat.messages))
    beginnings = (tokens(found, chat, count) for count in range(1, len(chat.messages)))
    return any(whole[: len(beginning)] != beginning for beginning in beginnings)


def scope(name: str, *, tools: bool) -> st.SearchStrategy[Chat]:
    return tool_chats() if tools else chats(system=name != "gemma", answered=False)


FLAGS = [(name, False, family.extends) for name, family in FAMILIES.items()] + [
    (name, True, family.extends_with_tools)
    for name, family in FAMILIES.items()
    if family.extends_with_tools is not None
]


@pytest.mark.parametrize(("name", "tools"), [(name, tools) for name, tools, extends in FLAGS if extends])
@PROOF
@given(data=st.data())
def test_it_extends(name: str, tools: bool, data: st.DataObject) -> None:
    chat = data.draw(scope(name, tools=tools))
    assert not breaks(renderer(name), chat)
    if name in SENTENCEPIECE:
        assert not breaks(renderer(name, sentencepiece=True), chat)


@pytest.mark.parametrize(("name", "tools"), [(name, tools) for name, tools, extends in FLAGS if not extends])
def test_it_does_not_extend(name: str, tools: bool) -> None:
    """`find` raises when there is no such chat."""
    chat = find(scope(name, tools=tools), lambda found: breaks(renderer(name), found), settings=SEARCH)
    assert breaks(renderer(name), chat)


def test_the_flag_is_told_for_families_and_unknown_for_others() -> None:
    assert renderer("chatml").extends is True
    assert renderer("qwen3").extends is False
    tokenizer = family_tokenizer("chatml")
    assert Renderer(tokenizer, RenderOptions()).extends is None


def test_the_page_says_what_the_registry_says() -> None:
    page = (HOME / "docs" / "rendering.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| [^|]* (\| (?:yes|no)[^|]*\| (?:–|yes|no)[^|]*)\|$", page, re.MULTILINE))
    said = {name: tuple(cell.strip().split(":")[0] for cell in cells.split("|")[1:]) for name, cells in rows.items()}
    word = {True: "yes", False: "no", None: "–"}
    assert said == {name: (word[found.extends], word[found.extends_with_tools]) for name, found in FAMILIES.items()}
