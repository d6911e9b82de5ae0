"""The Jinja environment that chat templates run in: transformers' environment with a bound on time and memory.

A chat template comes with a model or from a user, so it is a stranger's program. Jinja's sandbox keeps it from Python's
insides; the rest is here: loops and calls are counted against `MAX_STEPS` and a deadline, no text grows beyond
`MAX_CHARACTERS` and no list beyond `MAX_ITEMS`, and nothing that is nested deeper than any chat is written out,
compared or handed on. What transformers offers templates (`raise_exception`, `tojson`, `strftime_now`, loop controls,
`{% generation %}`) is here with the same results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 300_000
"""Loop iterations and calls of one rendering."""
MAX_SECONDS = 10.0
MAX_CHARACTERS = 32 << 20
"""Twice the largest row there can be."""
MAX_ITEMS = 300_000
MAX_DEPTH = 64
MAX_NUMBER = 100_000
"""Of an argument of a filter or a method: more is a width or a count that fills memory."""

TODAY = date(2024, 7, 26)
"""What `strftime_now` takes for today: the tokens of a row must not change overnight, and this is the date that
Llama 3.1's template falls back on."""

_LEFT_OUT = ("center", "filesizeformat", "forceescape", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")
"""Filters that make much out of little, or something else each time. No chat template that we know of uses one."""

_DICT = frozenset(dir(dict))

_TESTS_OF_TWO = (
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "greaterthan",
    "ge",
    ">=",
    "in",
)


class TooMuch(TemplateError):
    """The template takes more time or memory than any chat needs."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment, one thread. Set `opening` and `closing` to have `{% generation %}` blocks marked in the text."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols], finalize=self._written
        )
        self.opening = self.closing = ""
        self._steps, self._output, self._deadline = 0, 0, float("inf")
        self._known: set[int] = set()
        for name in _LEFT_OUT:
            self.filters.pop(name)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._guarded(function) for name, function in self.filters.items()}
        self.tests |= {name: self._guarded(self.tests[name]) for name in _TESTS_OF_TWO}
        # The names below hold a space, so that no template can call them: only `_parse` puts them in.
        self.filters |= {"each item": self._each, "as text": self._as_text, "as value": self._value}
        self.globals.pop("lipsum")
        self.globals |= _GLOBALS | {"namespace": _namespace_class(self._value)}

    def begin(self, *known: Any) -> None:
        """Before each rendering. `known`: the chat's own lists and objects, which need no look."""
        self._steps, self._output, self._deadline = 0, 0, time.monotonic() + MAX_SECONDS
        self._known = {id(value) for value in known}

    # --- counting ------------------------------------------------------------------------------------

    def _step(self, count: int = 1) -> None:
        before = self._steps
        self._steps += count
        if self._steps > MAX_STEPS or (self._steps >> 8 != before >> 8 and time.monotonic() > self._deadline):
            raise TooMuch(f"it takes more than {MAX_STEPS} steps or {MAX_SECONDS:.0f} s for one chat")

    def _value(self, value: Any) -> Any:
        """The value itself, unless it is larger or deeper than any chat."""
        kind = type(value)
        if kind is str:
            if len(value) > MAX_CHARACTERS:
                raise TooMuch("a text of it grows without bound")
        elif kind in (list, tuple, dict, set) and value and id(value) not in self._known:
            self._measure(value)
        elif kind is int and abs(value) > 1 << 63:
            raise TooMuch("a number of it grows without bound")
        return value

    def _measure(self, value: Any) -> int:
        """Characters of it, about. Shared parts count as often as they would be written."""
        items, characters, waiting = 0, 0, [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            items += 1
            if isinstance(part, str):
                characters += len(part)
            elif isinstance(part, (list, tuple, set)):
                waiting.extend((inner, depth + 1) for inner in part)
            elif isinstance(part, dict):
                waiting.extend((inner, depth + 1) for pair in part.items() for inner in pair)
            if items + len(waiting) > MAX_ITEMS or characters > MAX_CHARACTERS or depth > MAX_DEPTH:
                raise TooMuch("a list of it grows without bound")
        self._step(1 + (items >> 4))
        return characters + 8 * items

    def _written(self, value: Any) -> Any:
        if type(value) is str:
            self._output += len(value)
            if self._output > MAX_CHARACTERS:
                raise TooMuch("it writes without end")
            return value
        return self._value(value)

    def _as_text(self, value: Any) -> Any:
        return value if type(value) is str and len(value) <= MAX_CHARACTERS else str(self._value(value))

    def _each(self, value: Any) -> Any:
        try:
            self._step(len(value))
        except TypeError:
            return self._counted(value)
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    # --- what a template can do ------------------------------------------------------------------------

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        if isinstance(function, LoopContext):
            self._each(args[0] if args else ())
        elif not isinstance(function, Macro):
            self._check_arguments(function, args, kwargs)
        for value in args:
            self._value(value)
        for name, value in kwargs.items():
            if not name.startswith("_"):  # Jinja's own: the variables of the loop around
                self._value(value)
        return self._value(super().call(context, function, *args, **kwargs))

    def _check_arguments(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if not isinstance(text, str):
            return
        self._step(len(text) >> 12)
        if any(isinstance(value, int) and value > MAX_NUMBER for value in (*args, *kwargs.values())):
            raise TooMuch(f"`{name}` is called with a number beyond {MAX_NUMBER}")
        if name == "translate":
            raise TooMuch("`translate` may fill any amount of memory")
        if name == "replace" and len(args) >= 2:
            self._check_replace(text, *args[:2])
        if name == "join" and args:
            self._check_join(text, args[0])
        if name == "expandtabs" and text.count("\t") * MAX_NUMBER > MAX_CHARACTERS:
            raise TooMuch("`expandtabs` may fill any amount of memory")

    def wrap_str_format(self, value: Any) -> Any:
        """Called for every method that a template takes from a text."""
        found = super().wrap_str_format(value)
        if found is not None:
            raise TooMuch("`format` may fill any amount of memory; put texts together with `~`")
        return found

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        if (text.count(str(old)) + 1) * len(str(new)) + len(text) > MAX_CHARACTERS:
            raise TooMuch("`replace` makes a text that grows without bound")

    def _check_join(self, between: str, values: Any) -> None:
        if (
            isinstance(values, (list, tuple))
            and len(values) * len(between) + self._measure(values) > 2 * MAX_CHARACTERS
        ):
            raise TooMuch("`join` makes a text that grows without bound")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._step()
        match operator:
            case "*" if isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple)):
                times, repeated = (left, right) if isinstance(left, int) else (right, left)
                limit = MAX_CHARACTERS if isinstance(repeated, str) else MAX_ITEMS
                if isinstance(times, int) and times * len(repeated) > limit:
                    raise TooMuch("`*` makes a value that grows without bound")
            case "**" if not (isinstance(right, int) and 0 <= right <= 64 and abs(left) <= 1 << 32):
                raise TooMuch("`**` makes a number that grows without bound")
            case "%" if isinstance(left, str):
                raise TooMuch("`%` may fill any amount of memory; put texts together with `~`")
            case "+" if isinstance(left, list) and len(left) + len(right) > MAX_ITEMS:
                raise TooMuch("`+` makes a list that grows without bound")
        return self._value(super().call_binop(context, operator, left, right))

    def _guarded(self, function: Any) -> Callable[..., Any]:
        """A filter or a test whose arguments and answer are looked at."""
        name, passed = function.__name__, bool(getattr(function, "jinja_pass_arg", None))

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            mine = args[1:] if passed else args
            self._step(1 + (len(mine[0]) >> 12 if mine and isinstance(mine[0], str) else 0))
            for at, value in enumerate((*mine, *kwargs.values())):
                self._value(value)
                if at and isinstance(value, int) and value > MAX_NUMBER:
                    raise TooMuch(f"`{name}` is called with a number beyond {MAX_NUMBER}")
            if name == "do_replace" and len(mine) >= 3:
                self._check_replace(str(mine[0]), *mine[1:3])
            if name == "sync_do_join" or name == "do_join":
                self._check_join(str(mine[1]) if len(mine) > 1 else "", mine[0])
            return self._value(function(*args, **kwargs))

        return guarded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put the checks into the program: around what is looped over, joined, compared and used as a key."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _through("each item", loop.iter)
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [_through("as text", part) for part in joined.nodes]
        for compared in tree.find_all(nodes.Compare):
            compared.expr = _through("as value", compared.expr)
            for operand in compared.ops:
                operand.expr = _through("as value", operand.expr)
        for item in tree.find_all(nodes.Getitem):
            if not isinstance(item.arg, nodes.Slice):
                item.arg = _through("as value", item.arg)
        for pair in tree.find_all(nodes.Pair):
            pair.key = _through("as value", pair.key)
        return tree


class Plain(Environment):
    """The same language without a guard, for eft's own templates: half the time."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
        self.opening = self.closing = ""
        self.filters["tojson"] = _tojson
        self.globals |= _GLOBALS

    def begin(self, *known: Any) -> None:
        """As Sandbox.begin; there is nothing to count."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja does; a key of an object is looked for first where it can be nothing else."""
        if type(obj) is dict and attribute not in _DICT and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _through(name: str, node: Any) -> Any:
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`: what the model is to write."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own annotation

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        environment: Any = self.environment
        return f"{environment.opening}{caller()}{environment.closing}"


def _namespace_class(check: Callable[[Any], Any]) -> type[Namespace]:
    """Jinja's, less names with an underscore (as in transformers), and with a look at what is kept across loops."""

    class Checked(Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise TemplateError(f"a name in a namespace must not begin with an underscore: {name!r}")
            super().__setitem__(name, check(value))

    return Checked


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


_GLOBALS = {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.combine(TODAY, datetime.min.time()).strftime(form),
}
