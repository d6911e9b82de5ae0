"""Templates are strangers' programs: what real ones write is what transformers writes, and what never ends is ended."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from importlib import resources
from typing import Any

import pytest
from jinja2 import TemplateError, nodes
from transformers.utils.chat_template_utils import render_jinja_template

from core.data.rows import Chat, Message
from core.errors import DataError, SpecError
from core.spec.axes.rendering import GivenTemplate
from core.train.render.families import FAMILIES
from core.train.render.jinja.bounds import FILTERS, TooMuch
from core.train.render.jinja.deadline import deadline
from core.train.render.jinja.sandbox import Sandbox
from core.train.render.jinja.template import Asked, ChatTemplate
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
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


BIG = "{% set a = 'a' * 1000000 %}{% set b = 'b' * 1000000 %}"
HUGE = "{% set x = 'ab ' * 10000000 %}"
LOOP = "{% for i in range(100000) %}"
CONSTANT = LOOP + "y" * 50_000 + "{% endfor %}"
GREEDY = {
    "indent by a width": "{{ ('a\\n' * 20000) | indent(90000) }}",
    "indent by a text": BIG + "{{ ('a\\n' * 20000) | indent(b) }}",
    "indent by name": BIG + "{{ ('a\\n' * 20000) | indent(width=b, first=true) }}",
    "a filter block that indents": "{% filter indent(90000) %}" + "y\n" * 20000 + "{% endfilter %}",
    "join over a text": BIG + "{{ a | join(b) }}",
    "join over a range": BIG + "{{ range(90000) | join(b) }}",
    "join over what has no length": BIG + "{{ range(90000) | map('string') | join(b) }}",
    "join over an object": BIG + "{{ dict(a=1, b=2, c=b * 20) | join(b * 20) }}",
    "join by name": BIG + "{{ range(90000) | join(d=b) }}",
    "a method that joins a text": BIG + "{{ b.join(a) }}",
    "a method that joins a range": BIG + "{{ b.join(range(90000) | map('string')) }}",
    "a method that joins keys": BIG + "{{ b.join(messages[0] | map('upper') | list * 90000) }}",
    "JSON by a width": "{{ range(90000) | list | tojson(indent=90000) }}",
    "JSON by a text": BIG + "{{ range(90000) | list | tojson(indent=b) }}",
    "JSON by separators": BIG + "{{ range(90000) | list | tojson(separators=(b, b)) }}",
    "JSON of many escapes": "{{ ('\\n\"' * 15000000) | tojson(ensure_ascii=true) }}",
    "replace of nothing": "{{ ('a' * 1000000) | replace('', 'b' * 1000) }}",
    "replace by name": "{{ ('a' * 1000000) | replace(old='a', new='b' * 1000) }}",
    "replace with a count": "{{ ('a' * 1000000).replace('a', 'b' * 1000, -1) }}",
    "tabs by a width": "{{ ('\\t' * 100000).expandtabs(99999) }}",
    "tabs by name": "{{ ('\\t' * 100000).expandtabs(tabsize=99999) }}",
    "center": "{{ 'a'.center(10 ** 9) }}",
    "a float for a width": "{{ 'a' | indent(1e9) }}",
    "bytes": "{{ ('a'.encode() * 10 ** 10) | length }}",
    "bytes by the filter of attributes": "{{ ('a' | attr('encode'))() }}",
    "bytes in a format": "{{ ('%0999999999d'.encode() % 1) | length }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 9, 'big') | length }}",
    "a format of the class": "{{ 'a'.format_map({}) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "keys from a type": "{{ dict.fromkeys(range(90000)) | length }}",
    "~ of many": HUGE + "{{ " + " ~ ".join(["x"] * 200) + " }}",
    "~ again and again": HUGE + LOOP + "{% set y = x ~ i %}{% endfor %}",
    "+ of two": HUGE + "{{ x + x }}",
    "* of a text by itself": "{{ 'a' * ('a' * 10000000) | length * 10000000 }}",
    "* of a tuple": "{{ ((0,) * 10 ** 9) | length }}",
    "* of lists of lists": "{{ ([[0] * 1000] * 1000) | length }}",
    "variables, each as large as may be": "".join(f"{{% set v{at} = 'a' * (33000000 - {at}) %}}" for at in range(100)),
    "constant text": CONSTANT,
    "constant text in a set": "{% set y %}" + CONSTANT + "{% endset %}{{ y | length }}",
    "constant text in a macro": "{% macro m() %}" + "y" * 50_000 + "{% endmacro %}" + LOOP + "{{ m() }}{% endfor %}",
    "constant text in a filter": "{% filter upper %}" + CONSTANT + "{% endfilter %}",
    "constant text in a call": "{% macro m() %}{{ caller() | length }}{% endmacro %}{% call m() %}"
    + CONSTANT
    + "{% endcall %}",
    "constant text in a generation block": "{% generation %}" + CONSTANT + "{% endgeneration %}",
    "constant text in a block": "{% block b %}" + CONSTANT + "{% endblock %}",
    "dates with a width": "{{ strftime_now('%1500d' * 10000) | length }}",
    "dates with a huge width": "{{ strftime_now('%0999999999d') }}",
    "long dates": "{{ strftime_now('%c' * 10000000) | length }}",
    "sums of lists": "{{ (range(90000) | batch(1) | list) | sum(start=[]) | length }}",
    "sums of tuples": "{{ ([(1,) * 1000] * 200) | sum(start=()) | length }}",
    "words": HUGE + "{{ x.split() | length }}",
    "words with a separator": HUGE + "{{ x.rsplit('b') | length }}",
    "lines": "{{ ('\\n' * 30000000).splitlines() | length }}",
    "letters": HUGE + "{{ x | list | length }}",
    "titles": HUGE + "{{ x | title | length }}",
    "counted words": HUGE + "{{ x | wordcount }}",
    "tags": "{{ ('<!--' * 8000000) | striptags | length }}",
    "escapes of HTML": "{{ ('\"' * 30000000) | e | length }}",
    "escapes of addresses": "{{ ('é' * 16000000) | urlencode | length }}",
    "escapes of addresses in an object": "{{ {'a': 'é' * 16000000} | urlencode | length }}",
    "letters that are three in capitals": "{{ ('ΐ' * 33000000) | upper | length }}",
    "text of a list of escapes": "{{ ['\\U000F0000' * 16000000] | string | length }}",
    "escaping switched on": "{% autoescape true %}{{ '<' * 30000000 }}{% endautoescape %}",
    "powers of powers": "{{ 2 ** 64 ** 64 }}",
    "products of numbers": LOOP
    + "{% set n = 9 ** 19 * 9 ** 19 * 9 ** 19 * 9 ** 19 %}{% endfor %}{{ 9 ** 19 * 9 ** 19 }}",
    "a list that grows": "{% set n = namespace(x=[]) %}" + LOOP + "{% set n.x = n.x + [i] %}{% endfor %}",
    "an object that grows": "{% set n = namespace(x={}) %}"
    + LOOP
    + "{% set n.x = dict(n.x, **{i | string: i}) %}{% endfor %}",
    "elif without end": "{% if 0 %}" + "{% elif 0 %}" * 10_000 + "{% endif %}",
    "a chain without end": "{{ a" + ".b" * 60_000 + " }}",
    "filters without end": "{{ 1" + " | abs" * 40_000 + " }}",
    "lists in lists": "{{ " + "[" * 90_000 + "]" * 90_000 + " }}",
    # What takes time: nothing large is made, and most of it is done between two steps.
    "long searches": HUGE + LOOP + "{% if 'zz' in x %}{% endif %}{% endfor %}",
    "long counts": HUGE + LOOP + "{% set y = x.count('z') %}{% endfor %}",
    "long comparisons": HUGE + "{% set y = 'ab ' * 10000000 %}" + LOOP + "{% set z = x == y %}{% endfor %}",
    "long comparisons by a test": HUGE
    + "{% set y = 'ab ' * 10000000 %}"
    + LOOP
    + "{% set z = x is eq(y) %}{% endfor %}",
    "comparisons of lists": "{% set x = range(90000) | list %}" + LOOP + "{% set y = x == x | list %}{% endfor %}",
    "long slices": HUGE + LOOP + "{% set y = x[1:] %}{% endfor %}",
    "spaces taken off": "{% set x = ' ' * 30000000 %}" + LOOP + "{% set y = x | trim %}{% endfor %}",
    "loops that leave all out": LOOP + "{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "loops over the rows themselves": "{% for a in messages %}" * 18 + "{% endfor %}" * 18,
    "a filter over what a filter leaves": LOOP + "{{ range(100000) | select('odd') | list | length }}{% endfor %}",
}


@pytest.fixture(scope="module")
def greedy() -> dict[str, tuple[str, float]]:
    """What became of each, in a process that has a gigabyte to spare and gives each a second."""
    call = [sys.executable, "-m", "tests.support.templates_child"]
    ended = subprocess.run(call, input=json.dumps(GREEDY), capture_output=True, text=True, check=False, timeout=300)
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, (told[-1:], ended.stderr[-2000:])
    return {name: (outcome, seconds) for name, outcome, seconds, _ in told}


@pytest.mark.parametrize("name", GREEDY)
def test_what_asks_for_much_is_refused_before_it_has_it(name: str, greedy: dict[str, tuple[str, float]]) -> None:
    outcome, seconds = greedy[name]
    assert outcome.startswith(("it refuses this chat: ", "no template: ", "it never ends"))
    assert seconds < 10


def test_a_program_that_takes_no_step_is_ended_too() -> None:
    """The timer needs no help of the sandbox."""
    began = time.process_time()
    with pytest.raises(TooMuch, match="over"), deadline(0.2, TooMuch("over")):
        while True:
            pass
    assert time.process_time() - began < 5
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_real_templates_use_nothing_that_is_not_there() -> None:
    used: set[str] = set()
    for name in TEMPLATES:
        source = (resources.files("trl") / "chat_templates" / name).read_text(encoding="utf-8")
        tree = Sandbox().parse(source)
        used |= {found.name for found in tree.find_all(nodes.Filter) if " " not in found.name}
    assert used <= FILTERS and len(used) > 8


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
