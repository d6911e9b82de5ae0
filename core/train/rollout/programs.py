"""Rewards that are programs: each runs in the job's sandbox. A value is a number, or says why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.reward import CodeReward, ProgramReward, PythonReward
from core.train.rollout.rewards import Columns, fenced, tests_of

Value = float | str
"""A reward, or why it cannot be computed."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """What an answer answers."""

    line: int
    """Line of the row that the prompt is in."""
    prompt: str
    columns: Columns


def values_of(
    reward: ProgramReward,
    answers: Sequence[str],
    asked: Sequence[AnsweredPrompt],
    sandbox: ProgramSandbox,
    between: Callable[[], None] = lambda: None,
) -> list[Value]:
    """Compute a reward of each answer. `between` is called before each answer of the reward `code`. NoSandbox."""
    match reward:
        case PythonReward():
            return _called(reward, answers, asked, sandbox)
        case CodeReward():
            found: list[Value] = []
            for answer, one in zip(answers, asked, strict=True):
                between()
                found.append(_tested(reward, answer, one, sandbox))
            return found
        case _ as never:
            assert_never(never)


def _called(
    reward: PythonReward, answers: Sequence[str], asked: Sequence[AnsweredPrompt], sandbox: ProgramSandbox
) -> list[Value]:
    names = {name for one in asked for name in one.columns}
    arguments: dict[str, Any] = {name: [one.columns.get(name) for one in asked] for name in sorted(names)}
    arguments |= {"prompts": [one.prompt for one in asked], "completions": list(answers)}
    outcome = sandbox.run_function(reward.source, reward.function, arguments, seconds=reward.seconds)
    if outcome.error is None:
        return _numbers(outcome.value, len(answers))
    if outcome.ended is not None or len(answers) == 1:
        return [outcome.error] * len(answers)
    # Which answers it fails on, it shows when it gets them alone.
    alone = [_called(reward, [answer], [one], sandbox)[0] for answer, one in zip(answers, asked, strict=True)]
    return alone if any(isinstance(value, str) for value in alone) else [outcome.error] * len(answers)


def _numbers(value: Any, count: int) -> list[Value]:
    if not isinstance(value, list) or len(value) != count:
        found = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
        return [f"it returned {found}; return a list of {count} numbers, one for each of `completions`"] * count
    return [_number(one) for one in value]


def _number(value: Any) -> Value:
    if not isinstance(value, int | float):
        return f"it returned a {type(value).__name__} for this answer ({str(value)[:100]!r}); return a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else f"it returned {value!s:.20} for this answer; return a finite number"


def _tested(reward: CodeReward, answer: str, asked: AnsweredPrompt, sandbox: ProgramSandbox) -> float:
    """Share of the tests that pass. Whatever a program of the model's does wrong is a test that it does not pass."""
    tests, source = tests_of(asked.columns[reward.column]) or [], fenced(answer)
    passed = 0
    for test in tests:
        if isinstance(test, str):
            outcome = sandbox.run_script(f"{source}\n{test}", seconds=reward.seconds)
            right = outcome.value is True
        else:
            given, expected = test
            outcome = sandbox.run_script(source, stdin=given, seconds=reward.seconds)
            right = outcome.error is None and _lines(outcome.stdout) == _lines(expected)
        passed += right
        if reward.all and not right:
            return 0.0
    return passed / len(tests)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
