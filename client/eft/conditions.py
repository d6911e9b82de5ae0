"""`--fail-if 'eval_loss > 1.2'`: conditions on what a job has measured."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eft.errors import UsageFault

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_FORM = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    metric: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageFault(
                f"--fail-if {text!r}: write METRIC OPERATOR NUMBER, e.g. 'eval_loss > 1.2'", field="fail_if"
            )
        return cls(found[1], found[2], float(found[3]))

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether the job fails by it. What is not a finite number fails by every condition: a run that ended in NaN
        must not pass. Raises UsageFault for a metric that the job has not."""
        value = look_up(self.metric, figures)
        return not math.isfinite(value) or OPERATORS[self.sign](value, self.bound)


def look_up(metric: str, figures: Mapping[str, float]) -> float:
    """By its whole name, `eval_after.eval_loss`, or its last part, `eval_loss`: then that of after the training."""
    if metric in figures:
        return figures[metric]
    after = f"eval_after.{metric}"
    if after in figures:
        return figures[after]
    ends = [name for name in figures if name.rpartition(".")[2] == metric]
    if len(ends) == 1:
        return figures[ends[0]]
    if ends:
        raise UsageFault(f"{metric} may be {' or '.join(ends)}: write which", field="fail_if")
    known = ", ".join(sorted(figures)) or "none"
    raise UsageFault(f"the job has no figure {metric}; it has: {known}", field="fail_if")


def figures(result: Mapping[str, Any] | None, curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, float]:
    """All numbers of a job: those of its result, `eval_after.eval_loss`, and the last of each curve that the result
    says nothing of."""
    found: dict[str, float] = {}
    for name, curve in curves.items():
        if curve:
            last: float | None = curve[-1][1]  # JSON has no word for what is not finite: it comes as null
            found[name] = math.nan if last is None else last
    told: dict[str, float] = {}
    _flatten(result or {}, "", told)
    short = {name.rpartition(".")[2] for name in told}
    return {name: value for name, value in found.items() if name not in short} | told


def _flatten(value: Any, path: str, into: dict[str, float]) -> None:
    match value:
        case dict():
            for key, inner in value.items():
                _flatten(inner, f"{path}.{key}" if path else str(key), into)
        case bool():
            pass
        case int() | float():
            into[path] = float(value)
        case _:
            pass  # words and lists are no figures
