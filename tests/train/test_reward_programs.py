"""Rewards that are programs, in the sandbox: what they count, and what is told where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from core.errors import DataError
from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.reward import RewardArm
from core.train.rollout.rewards import refuse_rows_without
from core.train.rollout.sandboxed.programs import AnsweredPrompt, values_of


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    with ProgramSandbox() as sandbox:
        yield sandbox


def reward(**fields: Any) -> Any:
    return TypeAdapter(RewardArm).validate_python(fields)


def python(source: str, **fields: Any) -> Any:
    return reward(type="python", source=source, **fields)


ANSWERS = ["4", "five", "6"]
ASKED = [AnsweredPrompt(line, f"{line} + 1", {"reference": str(line + 1)}) for line in (3, 4, 5)]


def test_a_function_sees_prompts_completions_and_columns(sandbox: ProgramSandbox) -> None:
    source = (
        "def reward(prompts, completions, reference, **others):\n"
        "    return [float(c == r) + len(p) / 10 for p, c, r in zip(prompts, completions, reference)]"
    )
    assert values_of(python(source), ANSWERS, ASKED, sandbox) == [1.5, 0.5, 1.5]


def test_an_error_is_that_of_its_answer(sandbox: ProgramSandbox) -> None:
    source = "def score(completions):\n    return [int(c) for c in completions]"
    first, second, third = values_of(python(source, function="score"), ANSWERS, ASKED, sandbox)
    assert (first, third) == (4.0, 6.0)
    assert isinstance(second, str) and second.startswith("ValueError") and "line 2, in score" in second


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("1", "returned a int; return a list of 3 numbers"),
        ("[1]", "returned a list of 1; return a list of 3"),
        ("['1'] * 3", "returned a str for this answer"),
        ("[None] * 3", "returned a NoneType for this answer"),
        ("[float('nan')] * 3", "returned nan for this answer; return a finite number"),
        ("[10**400] * 3", "for this answer; return a finite number"),
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('socket').socket()", "PermissionError"),
    ],
)
def test_what_is_no_reward_is_told(sandbox: ProgramSandbox, returned: str, said: str) -> None:
    for value in values_of(python(f"def reward(completions): return {returned}"), ANSWERS, ASKED, sandbox):
        assert isinstance(value, str) and said in value


def test_a_slow_function_is_ended(sandbox: ProgramSandbox) -> None:
    source = "def reward(completions):\n    while True: pass"
    assert values_of(python(source, seconds=0.2), ANSWERS, ASKED, sandbox) == ["not done after 0.2 s"] * 3


def test_it_keeps_nothing_from_batch_to_batch(sandbox: ProgramSandbox) -> None:
    source = "seen = []\ndef reward(completions):\n    seen.append(1)\n    return [len(seen)] * len(completions)"
    assert [values_of(python(source), ANSWERS, ASKED, sandbox) for _ in range(2)] == [[1.0] * 3] * 2


ADDS = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
TWICE = "def twice(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("answer", "tests", "every", "expected"),
    [
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "11\n"}], True, 1),
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "12"}], True, 0),
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "12"}], False, 0.5),
        (TWICE, "assert twice(2) == 4", True, 1),
        (TWICE, ["assert twice(2) == 4", "assert twice(2) == 5"], False, 0.5),
        ("def", "assert True", True, 0),
        ("import os; os._exit(0)", "assert False", True, 0),
        ("raise SystemExit", "assert False", True, 0),
        ("def twice(x):\n    while True: pass", "assert twice(2) == 4", True, 0),
        ("import socket; socket.socket()", "assert True", True, 0),
    ],
)
def test_programs_are_tested(sandbox: ProgramSandbox, answer: str, tests: Any, every: bool, expected: float) -> None:
    asked = [AnsweredPrompt(1, "", {"tests": tests})]
    assert values_of(reward(type="code", all=every, seconds=0.5), [answer], asked, sandbox) == [expected]


def test_rows_without_tests_are_named() -> None:
    rows = [(2, {"tests": ["assert True"]}), (7, {"tests": [{"input": 1}]}), (9, {"tests": []})]
    with pytest.raises(DataError, match="rows 7, 9"):
        refuse_rows_without([reward(type="code")], rows)
    with pytest.raises(DataError, match="not a JSON Schema in row 3"):
        refuse_rows_without([reward(type="json_schema", column="s")], [(3, {"s": {"type": "nope"}}), (4, {"s": {}})])


def test_wrong_rewards_are_refused_at_submit() -> None:
    for fields, said in (
        ({"type": "python", "source": "def reward(:"}, "not a source of Python"),
        ({"type": "json_schema", "document": {"type": "nope"}}, "not a JSON Schema"),
        ({"type": "json_schema"}, "name the `column`"),
    ):
        with pytest.raises(ValidationError, match=said):
            reward(**fields)
