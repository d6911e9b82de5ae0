"""Templates are strangers' programs: what real ones write is what transformers writes, and what never ends is ended."""

from __future__ import annotations

import resource
import time
from importlib import resources
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from core.data.rows import Chat, Message
from core.errors import DataError, SpecError
from core.spec.rendering import GivenTemplate
from core.train.render.families import FAMILIES
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.render.template import Asked, ChatTemplate
from tests.support.chats import TOOLS
from tests.support.family_tokenizers import family_tokenizer

CONSTANTS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = sorted(
    entry.name for entry in (resources.files("trl") / "chat_templates").iterdir() if entry.name.endswith(".jinja")
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": "<ü & 'x'>"}}}
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": " q\n"}, {"role": "assistant", "content": "a"}], []),
    (
        [
            {"role": "system", "content": "S "},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>\nt\n</think>\n\na"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
        ],
        [],
    ),
    (
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "3."},
        ],
        list(TOOLS),
    ),
]


def test_there_are_real_templates_to_compare() -> None:
    assert len(TEMPLATES) > 50


@pytest.mark.parametrize("name", TEMPLATES)
def test_real_templates_write_what_transformers_writes(name: str) -> None:
    source = (resources.files("trl") / "chat_templates" / name).read_text(encoding="utf-8")
    if "strftime_now" in source:  # today is a fixed day with us
        source = source.replace("strftime_now(", "none and strftime_now(")
    ours = ChatTemplate(source, CONSTANTS, name="it")
    for messages, tools in CHATS:
        for prompt in (False, True):
            try:
                (theirs,), _ = render_jinja_template(
                    [messages], tools=tools or None, chat_template=source, add_generation_prompt=prompt, **CONSTANTS
                )
            except Exception:  # whatever a template raises there, it must refuse here
                with pytest.raises(DataError):
                    ours.text(Asked(messages, tools, 1), messages, prompt=prompt)
                continue
            assert ours.text(Asked(messages, tools, 1), messages, prompt=prompt) == theirs


def given(source: str) -> Renderer:
    return Renderer(family_tokenizer("chatml"), RenderOptions(rendering=GivenTemplate(template=source)))


CHAT = Chat((Message("user", "a" * 1000), Message("assistant", "b" * 1000)))
DOUBLE = "{% set n = namespace(x=messages[0].content) %}{% for i in range(60) %}"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over filters": "{% for a in range(99999) | map('string') %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}"
    "{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "text that doubles by ~": DOUBLE + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "text that doubles by +": DOUBLE + "{% set n.x = n.x + n.x %}{% endfor %}",
    "text that doubles by replace": DOUBLE + "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "text that doubles by a method": DOUBLE + "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "text that doubles by join": DOUBLE + "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "text that doubles by a join method": DOUBLE + "{% set n.x = ''.join([n.x, n.x]) %}{% endfor %}",
    "a list that doubles": DOUBLE + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a list that doubles and is compared": DOUBLE + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == n.x }}",
    "nested lists written out": "".join(f"{{% set a{at + 1} = [a{at}, a{at}] %}}" for at in range(40)).join(
        ("{% set a0 = messages[0].content %}", "{{ a40 }}")
    ),
    "nested lists as JSON": "".join(f"{{% set a{at + 1} = [a{at}, a{at}] %}}" for at in range(40)).join(
        ("{% set a0 = messages[0].content %}", "{{ a40 | tojson }}")
    ),
    "nested lists compared": "".join(
        f"{{% set a{at + 1} = [a{at}, a{at}] %}}{{% set b{at + 1} = [b{at}, b{at}] %}}" for at in range(40)
    ).join(("{% set a0 = messages[0].content %}{% set b0 = messages[0].content %}", "{{ a40 == b40 }}")),
    "repeated text": "{{ messages[0].content * 10 ** 9 }}",
    "repeated lists": "{{ ([0] * 10 ** 9) | length }}",
    "powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "widths in a format": "{{ '%999999999d' % 1 }}",
    "widths in a method": "{{ '{:>999999999}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "indent of a filter": "{{ 'a\\nb' | indent(999999999) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list | length }}",
    "tabs": "{{ (messages[0].content.replace('a', '\\t') * 1000).expandtabs(99999) }}",
    "output without end": "{% for a in range(99999) %}"
    "{% for b in range(20) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_never_ends_is_ended(source: str) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((DataError, SpecError)) as error:
        given(source + "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}").render(CHAT, 9)
    assert "the given template" in error.value.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
    assert time.process_time() - began < 40


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__['os'] }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_nothing_of_python_is_in_reach(source: str) -> None:
    with pytest.raises(DataError, match="refuses this chat"):
        given(source + "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}").render(CHAT, 1)


def test_whatever_a_template_raises_is_its_refusal_of_that_row() -> None:
    for source, words in (
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages[9].content.x }}", "refuses"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing.at.all }}", "undefined"),
    ):
        with pytest.raises(DataError, match=words) as error:
            given(source).render(CHAT, 5)
        assert error.value.field == "line 5"


def test_today_is_always_the_same_day() -> None:
    found = given("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert found.tokenizer.decode(found.render(CHAT, 1).ids).startswith("26 Jul 2024")


def test_blocks_inside_blocks_are_refused() -> None:
    source = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}<|im_end|>"
    with pytest.raises(DataError, match="inside another"):
        given(source).render(CHAT, 1)


def test_a_long_chat_is_within_the_bounds() -> None:
    """2000 turns and a turn of 4 MB are far from any limit, in the longest of our templates."""
    turns: list[dict[str, Any]] = []
    for at in range(1000):
        turns += [{"role": "user", "content": f"q{at}"}, {"role": "assistant", "content": "a"}]
    turns.append({"role": "user", "content": "x y\n" * (1 << 20)})
    turns.append({"role": "assistant", "content": "z"})
    template = ChatTemplate(FAMILIES["qwen3"].source, CONSTANTS, name="it")
    text, spans = template.marked_text(Asked(turns, list(TOOLS), 1))
    assert len(spans) == 1001 and len(text) > 4 << 20


def test_deep_nesting_is_no_crash() -> None:
    with pytest.raises((TemplateError, DataError)):
        ChatTemplate("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", {}, name="it")
