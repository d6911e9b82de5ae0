"""Scores of an answer against the completion of its row, each from 0 to 1: pure functions of two texts."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from core.spec.axes.evaluation.generation import (
    ChrF,
    Contains,
    ExactMatch,
    JsonValid,
    NumberMatch,
    RougeL,
    TextMetric,
    TokenF1,
    ToolCallMatch,
)
from core.train.rollout.rewards import extracted, last_number

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CHRF_ORDER, CHRF_BETA = 6, 2


def score(metric: TextMetric, answer: str, completion: str) -> float:
    """Score an answer. 0 where `extract` finds nothing in it, or nothing in the completion."""
    given, right = extracted(metric.extract, answer), extracted(metric.extract, completion)
    if given is None or right is None:
        return 0.0
    given, right = given.strip(), right.strip()
    match metric:
        case ExactMatch(ignore_case=ignore_case):
            return float(_folded(given, ignore_case) == _folded(right, ignore_case))
        case Contains(ignore_case=ignore_case):
            return float(_folded(right, ignore_case) in _folded(given, ignore_case))
        case NumberMatch(tolerance=tolerance):
            found, wanted = last_number(given), last_number(right)
            if found is None or wanted is None:
                return 0.0
            return float(math.isclose(found, wanted, rel_tol=tolerance, abs_tol=0.0))
        case TokenF1():
            return _f1(_words(given), _words(right))
        case RougeL():
            return _rouge_l(_alphanumeric(given), _alphanumeric(right))
        case ChrF():
            return _chrf(given, right)
        case JsonValid():
            return float(_is_json(given))
        case ToolCallMatch():
            return float(list(tool_calls(given)) == list(tool_calls(right)))
        case _ as never:
            assert_never(never)


def tool_calls(text: str) -> Iterator[tuple[str, Any]]:
    """(name, arguments) of each call: an object with `name` and `arguments` or `parameters`, in the order of the text.
    Arguments that are a string of JSON are parsed."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start != -1:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        if (call := _call(found)) is not None:
            yield call
            start = text.find("{", end)
        else:  # a call may lie in an object around it
            start = text.find("{", start + 1)


def _call(found: dict[str, Any]) -> tuple[str, Any] | None:
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(name := found.get("name"), str) or arguments is None:
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return name, arguments
    return name, arguments


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


def _words(text: str) -> list[str]:
    """As SQuAD's evaluation has them: lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _alphanumeric(text: str) -> list[str]:
    """As ROUGE has them: runs of letters and digits, lower case. Letters of any script count, unlike in the original,
    which would drop all but those of English."""
    return re.findall(r"[^\W_]+", text.lower())


def _f1(given: Sequence[str], right: Sequence[str]) -> float:
    if not given or not right:
        return float(list(given) == list(right))
    common = sum((Counter(given) & Counter(right)).values())
    return 2 * common / (len(given) + len(right))


def _rouge_l(given: Sequence[str], right: Sequence[str]) -> float:
    if not given or not right:
        return float(list(given) == list(right))
    before = [0] * (len(right) + 1)
    for word in given:
        row = [0]
        for at, other in enumerate(right, 1):
            row.append(before[at - 1] + 1 if word == other else max(before[at], row[-1]))
        before = row
    return 2 * before[-1] / (len(given) + len(right))


def _chrf(given: str, right: str) -> float:
    """F2 of mean precision and mean recall over the orders of character n-grams that both texts have; white space does
    not count."""
    given, right = ("".join(text.split()) for text in (given, right))
    precisions, recalls = [], []
    for order in range(1, CHRF_ORDER + 1):
        ours, theirs = _n_grams(given, order), _n_grams(right, order)
        if not ours or not theirs:
            break
        common = (ours & theirs).total()
        precisions.append(common / ours.total())
        recalls.append(common / theirs.total())
    precision, recall = sum(precisions), sum(recalls)
    if precision + recall == 0:
        return float(given == right)
    weight = CHRF_BETA**2
    return (1 + weight) * precision * recall / ((weight * precision + recall) * len(precisions))


def _n_grams(text: str, order: int) -> Counter[str]:
    return Counter(text[at : at + order] for at in range(len(text) - order + 1))


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    return True


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
