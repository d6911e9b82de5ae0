"""The Jinja environment that chat templates run in: transformers' environment with a bound on time and memory.

A chat template comes with a model or from a user, so it is a stranger's program. Jinja's sandbox keeps it from Python's
insides. The rest is here; `bounds.py` has what a template may use, and counts results before they are made.

- Every loop iteration, call, operator, filter and slice is a step, and looks at the clock.
- Every text that is written is counted, constant ones too, and all large values that are made, together.
- A timer of the process (`deadline.py`) ends what no step ends.

What transformers offers templates (`raise_exception`, `tojson`, `strftime_now`, loop controls, `{% generation %}`) is
here with the same results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date, datetime
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from core.train.render.jinja import bounds
from core.train.render.jinja.bounds import MAX_CHARACTERS, TooMuch
from core.train.render.jinja.checks import Checks
from core.train.render.jinja.deadline import deadline

MAX_STEPS = 300_000
"""Loop iterations, calls, filters and operators of one rendering."""
MAX_SECONDS = 10.0
"""Seconds of processor time for one rendering, and for compiling one template."""
MAX_MADE_BYTES = 512 << 20
"""Bytes of all large values that one rendering creates, whether it keeps them or not."""
LARGE = 64 << 10
"""Bytes of a text that count as large."""

TODAY = date(2024, 7, 26)
"""What `strftime_now` takes for today: the tokens of a row must not change overnight, and this is the date that
Llama 3.1's template falls back on."""

_DICT = frozenset(dir(dict))

_TESTS_OF_TWO = (
    *("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan"),
    *("le", "<=", "gt", ">", "greaterthan", "ge", ">=", "in"),
)


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment, one thread. Set `opening` and `closing` to have `{% generation %}` blocks marked in the text."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, loopcontrols],
            # With a context it is never called while compiling, so that constants are counted as often as written.
            finalize=self._written,
            optimized=False,
        )
        self.opening = self.closing = ""
        self.begin()
        known = {name: function for name, function in self.filters.items() if name in bounds.FILTERS}
        known["tojson"] = _tojson
        self.filters = {name: self._guarded(name, function) for name, function in known.items()}
        self.tests |= {name: self._guarded_test(self.tests[name]) for name in _TESTS_OF_TWO}
        # The names below hold a space, so that no template can write them: only `_parse` puts them in.
        self.filters |= {"each item": self._each, "as one text": self._as_one_text}
        self.filters |= {"as value": self._looked_at, "as new": self._cut}
        self.globals.pop("lipsum")
        self.globals |= _GLOBALS | {"namespace": _namespace_class(self._value)}

    def begin(self, *known: Any) -> None:
        """Before each rendering. `known`: the chat's own lists and objects, which need no look."""
        self._steps, self._output, self._made = 0, 0, 0
        self._late, self._used = time.monotonic() + MAX_SECONDS, time.process_time() + MAX_SECONDS
        self._known = {id(value) for value in known}

    def bounded(self) -> AbstractContextManager[None]:
        """Around compiling and rendering: TooMuch once it has used its time."""
        return deadline(MAX_SECONDS, TooMuch(_TOO_LONG))

    # --- counting ------------------------------------------------------------------------------------

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > MAX_STEPS or (time.monotonic() > self._late and time.process_time() > self._used):
            raise TooMuch(_TOO_LONG)

    def _value(self, value: Any) -> Any:
        """The value itself, unless it is larger or deeper than any chat."""
        kind = type(value)
        if isinstance(value, str):
            bounds.at_most(len(value), MAX_CHARACTERS, "a text of it")
        elif kind in (list, tuple, dict, set) and value and id(value) not in self._known:
            self._step(1 + (bounds.measured(value)[0] >> 4))
        elif kind is int and abs(value) > 1 << 63:
            raise TooMuch("a number of it grows without bound")
        return value

    def _new(self, value: Any) -> Any:
        """As `_value`, of what was just made: large texts count until the end of the rendering."""
        if isinstance(value, str) and (size := sys.getsizeof(value)) > LARGE:
            self._made += size
            bounds.at_most(self._made, MAX_MADE_BYTES, "what it makes in all")
        return self._value(value)

    @pass_context
    def _written(self, context: Any, value: Any) -> Any:
        if isinstance(value, str):
            self._output += len(value)
            bounds.at_most(self._output, MAX_CHARACTERS, "what it writes")
            return value
        return self._as_text(value)

    def _as_text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, (list, tuple, dict, set)):
            self._value(value)
            bounds.written(value)
        return str(self._value(value))

    @pass_context
    def _as_one_text(self, context: Any, parts: list[Any]) -> str:
        """`~`: the sum of its parts is counted before they are put together."""
        self._step()
        texts = [self._as_text(part) for part in parts]
        bounds.at_most(sum(map(len, texts)), MAX_CHARACTERS, "a text of it")
        return str(self._new("".join(texts)))

    @pass_context
    def _looked_at(self, context: Any, value: Any) -> Any:
        self._step()
        return self._value(value)

    @pass_context
    def _cut(self, context: Any, value: Any) -> Any:
        self._step()
        return self._new(value)

    @pass_context
    def _each(self, context: Any, value: Any) -> Any:
        """What is looped over; each iteration is a step of its own besides (`_parse`)."""
        try:
            self._step(len(value))
        except TypeError:
            return self._counted(value)
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _list(self, values: Any) -> Any:
        """A list of what has no length, each of its items counted."""
        if hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            return values
        found: list[Any] = []
        characters = 0
        for value in self._counted(values):
            characters += len(value) if isinstance(value, str) else 0
            bounds.at_most(characters, MAX_CHARACTERS, "a list of it")
            found.append(value)
        return found

    # --- what a template can do ------------------------------------------------------------------------

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return bounds.may_use(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        text = getattr(function, "__self__", None)
        if isinstance(function, LoopContext):
            self._each(context, args[0] if args else ())
        elif isinstance(text, str):
            name = getattr(function, "__name__", "")
            if name == "join" and args:
                args = (self._list(args[0]), *args[1:])
            bounds.check_method(text, name, args, kwargs)
        for value in args:
            self._value(value)
        for name, value in kwargs.items():
            if not name.startswith("_"):  # Jinja's own: the variables of the loop around
                self._value(value)
        found = super().call(context, function, *args, **kwargs)
        return found if found is text else self._new(found)

    def wrap_str_format(self, value: Any) -> Any:
        """Called for every method that a template takes from a text."""
        found = super().wrap_str_format(value)
        if found is not None:
            raise TooMuch("`format` may fill any amount of memory; put texts together with `~`")
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._step()
        bounds.check_operator(operator, left, right)
        return self._new(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter whose arguments and answer are looked at."""
        passed = 1 if getattr(function, "jinja_pass_arg", None) else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._step()
            for value in (*args[passed:], *kwargs.values()):
                self._value(value)
            if name in ("join", "list", "sort", "unique", "sum", "batch", "slice", "reverse", "groupby", "max", "min"):
                args = (*args[:passed], self._list(args[passed]), *args[passed + 1 :])
            bounds.check_filter(name, args[passed:], kwargs)
            found = function(*args, **kwargs)
            return found if found is args[passed] else self._new(found)

        return guarded

    def _guarded_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any) -> Any:
            self._step()
            for value in args:
                self._value(value)
            return function(*args)

        return guarded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put the checks into the program: around what is looped over, joined, compared, cut and used as a key."""
        tree: nodes.Template = Checks().visit(super()._parse(source, name, filename))
        return tree


_TOO_LONG = f"it takes more than {MAX_STEPS} steps or {MAX_SECONDS:.0f} s for one chat"


class Plain(Environment):
    """The same language without a guard, for eft's own templates: half the time."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
        self.opening = self.closing = ""
        self.filters["tojson"] = _tojson
        self.globals |= _GLOBALS

    def begin(self, *known: Any) -> None:
        """As Sandbox.begin; there is nothing to count."""

    def bounded(self) -> AbstractContextManager[None]:
        """As Sandbox.bounded; there is nothing to fear."""
        return nullcontext()

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja does; a key of an object is looked for first where it can be nothing else."""
        if type(obj) is dict and attribute not in _DICT and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


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
    bounds.check_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    bounds.check_date_form(form)
    return datetime.combine(TODAY, datetime.min.time()).strftime(form)


_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
