"""Rewards of answers: pure functions of an answer's text, its number of tokens and the columns of its prompt's row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from jsonschema import Draft202012Validator
from referencing import Registry

from core.data.rows import PromptOnly
from core.errors import DataError
from core.spec.axes.rollout.reward import (
    CodeReward,
    ExactReward,
    FormatReward,
    JsonSchemaReward,
    KeywordsReward,
    LengthReward,
    NumberReward,
    RegexReward,
    RewardArm,
    TaskReward,
    TextReward,
    wrong_schema,
)
from core.spec.axes.rollout.tasks import tasks

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = 5
"""Rows that an error names."""

Columns = Mapping[str, Any]
"""Columns of a prompt's row, `reference` among them."""


def columns_of(row: PromptOnly) -> dict[str, Any]:
    """All that rewards may read of a row."""
    return row.extra | {"reference": row.reference}


def reward_of(reward: TextReward, answer: str, tokens: int, columns: Columns) -> float:
    """Compute a reward of an answer. `tokens`: those of the answer; `columns`: checked by `refuse_rows_without`."""
    match reward:
        case ExactReward():
            found = extracted(reward.extract, answer)
            expected = str(columns[reward.column])
            if found is None:
                return 0.0
            if reward.ignore_case:
                found, expected = found.casefold(), expected.casefold()
            return float(found.strip() == expected.strip())
        case NumberReward():
            found = extracted(reward.extract, answer)
            number, right = None if found is None else last_number(found), last_number(str(columns[reward.column]))
            if number is None or right is None:
                return 0.0
            return float(math.isclose(number, right, rel_tol=reward.tolerance, abs_tol=0.0))
        case RegexReward():
            if reward.whole:
                return float(re.fullmatch(reward.pattern, answer.strip()) is not None)
            return float(re.search(reward.pattern, answer) is not None)
        case FormatReward():
            return float(_in_sections(reward.tags, answer))
        case LengthReward():
            if tokens < reward.least:
                return 0.0
            if tokens <= reward.most:
                return 1.0
            return max(0.0, 1.0 - (tokens - reward.most) / reward.slack) if reward.slack else 0.0
        case KeywordsReward():
            said = answer.casefold()
            if any(word.casefold() in said for word in reward.never):
                return 0.0
            words = [*reward.words, *_words(columns.get(reward.column) if reward.column else None)]
            return sum(word.casefold() in said for word in words) / len(words) if words else 1.0
        case JsonSchemaReward():
            return float(_allowed(columns[reward.column] if reward.column else reward.document, answer))
        case _ as never:
            assert_never(never)


ROWS = "\0"
"""Place of the rows in a message; no name of a column has it."""


def refuse_rows_without(rewards: Sequence[RewardArm], rows: Sequence[tuple[int, Columns]]) -> None:
    """DataError that names the rows (line, columns) that lack what a reward reads, or hold what it cannot use."""
    for reward in rewards:
        column = getattr(reward, "column", None)
        if column is None:
            continue
        read = [(line, columns.get(column)) for line, columns in rows]
        says = f"the reward `{reward.type}` reads the column `{column}`, which"
        _refuse(
            [line for line, value in read if value is None],
            f"{says} {ROWS} do not have; add it, or name another column",
        )
        match reward:
            case NumberReward():
                odd = [line for line, value in read if last_number(str(value)) is None]
                _refuse(odd, f"{says} has no number in {ROWS}; mend them, or use the reward `exact`")
            case JsonSchemaReward():
                _refuse(
                    [line for line, value in read if not _is_schema(value)], f"{says} is not a JSON Schema in {ROWS}"
                )
            case CodeReward():
                odd = [line for line, value in read if tests_of(value) is None]
                what = f"is neither a list of objects `{{input, output}}` nor of Python sources in {ROWS}"
                _refuse(odd, f"{says} {what}")
            case TaskReward():
                odd = [line for line, value in read if not _is_problem(value)]
                _refuse(odd, f"{says} is no problem of a task that is known here in {ROWS}; `data` makes them")
            case KeywordsReward():
                odd = [line for line, value in read if not _is_words(value)]
                _refuse(odd, f"{says} is neither a string nor a list of strings in {ROWS}")


def _refuse(odd: Sequence[int], message: str) -> None:
    """DataError with these rows in the place of ROWS, if there are any."""
    if odd:
        raise DataError(message.replace(ROWS, name_rows(odd)), field="stage.reward", code="no_reward_column")


Test = str | tuple[str, str]
"""A source that runs behind the answer, or what it reads and should print."""


def tests_of(value: Any) -> list[Test] | None:
    """The tests in a column of the reward `code`; None where it holds anything else, or none."""
    found: list[Test] = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str):
            found.append((one["input"], one["output"]))
        else:
            return None
    return found or None


def fenced(answer: str) -> str:
    """The last fenced block of an answer, or the whole answer where there is none."""
    found = FENCE.findall(answer)
    return found[-1] if found else answer


def _allowed(document: Any, answer: str) -> bool:
    """Whether an answer is JSON that a JSON Schema allows."""
    try:
        value = json.loads(fenced(answer), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return bool(Draft202012Validator(document, registry=Registry()).is_valid(value))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) and wrong_schema(value) is None


def _is_problem(value: Any) -> bool:
    """Whether it is what a row of a task (core/train/rollout/sandboxed/tasks.py) has."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in tasks():
        return False
    return {"level", "options", "question", "answer", "metadata"} <= value.keys()


def extracted(pattern: str | None, answer: str) -> str | None:
    """The first group of the last match, or the whole answer where there is no pattern; None without a match."""
    if pattern is None:
        return answer
    found = list(re.finditer(pattern, answer, re.DOTALL))
    return found[-1].group(1) if found else None


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators dropped; None where there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    value = float(found[-1].replace(",", "").rstrip("."))
    return value if math.isfinite(value) else None


def _in_sections(tags: Sequence[str], answer: str) -> bool:
    inside = "".join(rf"\s*<{tag}>(?:(?!</?(?:{'|'.join(tags)})>).)*</{tag}>" for tag in tags)
    return re.fullmatch(rf"{inside}\s*", answer, re.DOTALL) is not None


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _words(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def name_rows(lines: Sequence[int]) -> str:
    """Name the first of some rows, and say how many there are."""
    shown = ", ".join(str(line) for line in lines[:SHOWN])
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"row{'s' if len(lines) > 1 else ''} {shown}{more}"
