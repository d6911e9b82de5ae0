"""Rewards of answers: what each counts, and rows that lack what it reads."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from core.errors import DataError
from core.spec.axes.rollout.reward import RewardArm, Rewards
from core.train.rollout.buffer import Rollout, advantages_of
from core.train.rollout.rewards import last_number, refuse_rows_without, reward_of


def reward(value: Any) -> Any:
    return TypeAdapter(RewardArm).validate_python(value)


TAGGED = {"type": "exact", "extract": "<answer>(.*?)</answer>"}


@pytest.mark.parametrize(
    ("spec", "answer", "columns", "expected"),
    [
        ("exact", " Paris\n", {"reference": "Paris"}, 1),
        ("exact", "paris", {"reference": "Paris"}, 0),
        ({"type": "exact", "ignore_case": True}, "paris", {"reference": "Paris"}, 1),
        ({"type": "exact", "column": "gold"}, "7", {"gold": 7}, 1),
        (TAGGED, "<answer>1</answer> no: <answer>\n2 </answer>", {"reference": "2"}, 1),
        (TAGGED, "2", {"reference": "2"}, 0),
        ("number", "so 3 + 4 = 7.", {"reference": "7"}, 1),
        ("number", "it costs $1,234.50", {"reference": "total 1234.5"}, 1),
        ("number", "-2e3", {"reference": "-2000"}, 1),
        ("number", "seven", {"reference": "7"}, 0),
        ({"type": "number", "tolerance": 0.01}, "3.15", {"reference": "3.14159"}, 1),
        ({"type": "number", "extract": r"= (\S+)"}, "1 = 5 so 9", {"reference": "5"}, 1),
        ({"type": "regex", "pattern": r"\d\d"}, "a 42", {}, 1),
        ({"type": "regex", "pattern": r"\d\d", "whole": True}, "a 42", {}, 0),
        ("format", "<think>a\nb</think>\n <answer>c</answer>\n", {}, 1),
        ("format", "<think>a</think> so <answer>c</answer>", {}, 0),
        ("format", "<answer>c</answer><think>a</think>", {}, 0),
        ("format", "<think>a<answer></think><answer>c</answer>", {}, 0),
        ({"type": "keywords", "words": ["Sun", "moon"]}, "the sun", {}, 0.5),
        ({"type": "keywords", "words": ["sun"], "never": ["sorry"]}, "Sorry, sun", {}, 0),
        ({"type": "keywords", "column": "words"}, "a b", {"words": ["a", "b", "c", "d"]}, 0.5),
        ({"type": "keywords", "never": ["x"]}, "y", {}, 1),
        ({"type": "json_schema", "document": {"type": "object", "required": ["a"]}}, '{"a": 1}', {}, 1),
        ({"type": "json_schema", "document": {"type": "object", "required": ["a"]}}, '{"b": 1}', {}, 0),
        ({"type": "json_schema", "document": {"type": "number"}}, "so:\n```json\n5\n```\n", {}, 1),
        ({"type": "json_schema", "document": {"type": "number"}}, "NaN", {}, 0),
        ({"type": "json_schema", "document": {"type": "number"}}, "five", {}, 0),
        ({"type": "json_schema", "document": {}}, "[" * 100_000, {}, 0),
        ({"type": "json_schema", "column": "wanted"}, '"x"', {"wanted": {"enum": ["x", "y"]}}, 1),
    ],
)
def test_rewards(spec: Any, answer: str, columns: dict[str, Any], expected: float) -> None:
    assert reward_of(reward(spec), answer, 5, columns) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0), (2, 1), (10, 1), (15, 0.5), (20, 0), (30, 0)])
def test_the_reward_of_a_length(tokens: int, expected: float) -> None:
    assert reward_of(reward({"type": "length", "least": 2, "most": 10, "slack": 10}), "", tokens, {}) == expected


@pytest.mark.parametrize(
    ("text", "number"), [("", None), ("1,000,000", 1e6), ("x.5", 0.5), ("5.", 5), ("9e999", None), ("1 2 3", 3)]
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([], "at least 1"),
        (["exact", "exact"], "two rewards are called `exact`"),
        ([{"type": "regex", "pattern": "("}], "not a regular expression"),
        ([{"type": "number", "extract": "answer"}], "parentheses"),
        (["keywords"], "name `words`"),
        (["exacct"], "exact"),
        ([{"type": "exact", "weight": float("nan")}], "weight"),
    ],
)
def test_specs_that_are_refused(spec: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(Rewards).validate_python(spec)


def test_rows_without_a_column_are_named() -> None:
    rows = [(line, {"reference": None if line % 2 else "5"}) for line in range(1, 20)]
    with pytest.raises(DataError, match=r"`reference`, which rows 1, 3, 5, 7, 9 and 5 more do not have"):
        refuse_rows_without([reward("exact")], rows)
    with pytest.raises(DataError, match="neither a string nor a list"):
        refuse_rows_without([reward({"type": "keywords", "column": "w"})], [(1, {"w": 3})])
    refuse_rows_without([reward({"type": "regex", "pattern": "a"})], rows)


def test_advantages_are_those_of_each_group() -> None:
    found = advantages_of([1, 0, 0, 1, 5, 5, 5, 5], 4, scale=True)
    assert found[0] == pytest.approx(0.5 / (0.57735 + 1e-4), rel=1e-5) and found[0] == -found[1] == found[3]
    assert found[4:] == [0.0] * 4
    assert advantages_of([3, 1], 2, scale=False) == [1.0, -1.0]


def test_a_rollout_survives_a_checkpoint_to_the_bit() -> None:
    import json

    import numpy as np

    values = np.array([-0.1, -1e-7, -3.4e38], dtype=np.float32)
    one = Rollout(
        3, [[1, 2], [3]], [5, 0], [[7], [], [8, 9], []], [True, False, True, True], {"a": [0.1, 0.2, 1 / 3, 0.0]},
        [0.1, 0.1, 1 / 3, 0.0], [0.0, 0.0, 0.7, -0.7], {"sampler": values}, [1, 3],
    )  # fmt: skip
    back = Rollout.of(json.loads(json.dumps(one.state_dict())))
    assert back.state_dict() == one.state_dict() and back.answers == one.answers and back.prompts == one.prompts
    assert np.array_equal(back.token_values["sampler"], values)
    assert one.varied() == [2, 3]
