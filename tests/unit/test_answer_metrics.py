"""Scores of generated answers, against recorded scores of the libraries that people know."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from core.spec.axes.evaluation.generation import AnswerMetricArm, Generation
from core.train.evaluation.answer_metrics import score, tool_calls

ADAPTER: TypeAdapter[Any] = TypeAdapter(AnswerMetricArm)


def scored(metric: Any, answer: str, completion: str) -> float:
    return score(ADAPTER.validate_python(metric), answer, completion)


# answer, completion, ROUGE-L by rouge-score 0.1.2, chrF by sacrebleu 2.6.0 (sentence_score / 100)
RECORDED = [
    ("the cat sat on the mat", "the cat is on the mat", 0.8333333333333334, 0.645779420625287),
    ("The quick, brown fox!", "a quick brown dog jumped", 0.4444444444444445, 0.29207505098140163),
    ("42", "42", 1.0, 1.0),
    ("no", "yes", 0.0, 0.0),
    ("ab", "abcdefgh", 0.0, 0.23404255319148937),
    ("turn_on the hall lights", "turn on the lights in the hall", 0.6666666666666666, 0.5387380823852796),
    ("Lorem ipsum dolor sit amet", "ipsum Lorem amet sit dolor", 0.4000000000000001, 0.4907685881370092),
]


@pytest.mark.parametrize(("answer", "completion", "rouge_l", "chrf"), RECORDED)
def test_rouge_l_and_chrf_are_those_of_the_libraries(answer: str, completion: str, rouge_l: float, chrf: float) -> None:
    assert scored("rouge_l", answer, completion) == pytest.approx(rouge_l, abs=1e-9)
    assert scored("chrf", answer, completion) == pytest.approx(chrf, abs=1e-9)


@pytest.mark.parametrize(
    ("metric", "answer", "completion", "expected"),
    [
        ("exact_match", " 42\n", "42", 1),
        ("exact_match", "42.", "42", 0),
        ({"type": "exact_match", "ignore_case": True}, "YES", "yes", 1),
        ({"type": "exact_match", "extract": "####(.*)"}, "2+2=4 #### 4", "so #### 4", 1),
        ({"type": "exact_match", "extract": "####(.*)"}, "4", "so #### 4", 0),
        ("number_match", "it is $1,234.50", "1234.5", 1),
        ("number_match", "12 apples and 13", "12", 0),
        ("number_match", "none", "12", 0),
        ({"type": "number_match", "tolerance": 0.01}, "100.5", "100", 1),
        ("contains", "I think Paris is it", "Paris", 1),
        ("contains", "I think paris is it", "Paris", 0),
        ("f1", "The cat, sat!", "a cat sat", 1),
        ("f1", "cat", "cat sat", 2 / 3),
        ("f1", "the", "a", 1),
        ("f1", "", "cat", 0),
        ("json_valid", '{"a": [1, 2]}', "anything", 1),
        ("json_valid", '{"a": NaN}', "anything", 0),
        ("json_valid", "Sure! {}", "anything", 0),
        ("json_valid", "[" * 100_000, "anything", 0),
    ],
)
def test_scores(metric: Any, answer: str, completion: str, expected: float) -> None:
    assert scored(metric, answer, completion) == pytest.approx(expected)


CALL = '<tool_call>\n{"name": "light", "arguments": {"room": "hall", "on": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CALL, 1),
        ('{"name":"light","parameters":{"on":true,"room":"hall"}}', 1),  # as Llama 3 writes it, keys in another order
        ('[{"name": "light", "arguments": "{\\"room\\": \\"hall\\", \\"on\\": true}"}]', 1),
        ('{"function": {"name": "light", "arguments": {"room": "hall", "on": true}}}', 1),
        (CALL.replace("hall", "attic"), 0),
        (CALL + CALL, 0),
        ("The light is on.", 0),
        ('{"name": "light", "arguments": {"room": "hall"', 0),
        ("{" * 50_000, 0),
    ],
)
def test_tool_calls_are_compared_as_json(answer: str, expected: float) -> None:
    assert scored("tool_call_match", answer, CALL) == expected


def test_where_nothing_is_called_nothing_may_be_called() -> None:
    assert scored("tool_call_match", "It is {warm} here.", "Nice weather.") == 1
    assert scored("tool_call_match", CALL, "Nice weather.") == 0
    assert list(tool_calls('{"name": "a", "arguments": {"name": "b", "arguments": {}}}')) == [
        ("a", {"name": "b", "arguments": {}})
    ]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["f1", "f1"], "two metrics are called `f1`"),
        ([], "at least 1 item"),
        (["bleu"], "rouge_l"),
        ([{"type": "exact_match", "extract": "####.*"}], "put parentheses"),
        ([{"type": "f1", "tolerance": 0.1}], "tolerance"),
    ],
)
def test_metrics_that_cannot_be_are_refused(metrics: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(Generation).validate_python({"metrics": metrics})
