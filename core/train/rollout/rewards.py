"""Rewards of answers: pure functions of an answer's text, its number of tokens and the columns of its prompt's row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from core.errors import DataError
from core.spec.axes.rollout.reward import (
    ExactReward,
    FormatReward,
    KeywordsReward,
    LengthReward,
    NumberReward,
    RegexReward,
    RewardArm,
)

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
SHOWN = 5
"""Rows that an error names."""

Columns = Mapping[str, Any]
"""Columns of a prompt's row, `reference` among them."""


def reward_of(reward: RewardArm, answer: str, tokens: int, columns: Columns) -> float:
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
        case _ as never:
            assert_never(never)


def refuse_rows_without(rewards: Sequence[RewardArm], rows: Sequence[tuple[int, Columns]]) -> None:
    """DataError that names the rows (line, columns) that lack what a reward reads, or hold what it cannot use."""
    for reward in rewards:
        column = getattr(reward, "column", None)
        if column is None:
            continue
        if missing := [line for line, columns in rows if columns.get(column) is None]:
            raise DataError(
                f"the reward `{reward.type}` reads the column `{column}`, which {_lines(missing)} do not have; add it, "
                "or name another column",
                field="stage.reward",
                code="no_reward_column",
            )
        if isinstance(reward, NumberReward):
            odd = [line for line, columns in rows if last_number(str(columns[column])) is None]
            if odd:
                raise DataError(
                    f"the reward `number` reads the column `{column}`, which has no number in {_lines(odd)}; mend "
                    "them, or use the reward `exact`",
                    field="stage.reward",
                    code="no_reward_column",
                )
        if isinstance(reward, KeywordsReward):
            odd = [line for line, columns in rows if not _is_words(columns[column])]
            if odd:
                raise DataError(
                    f"the reward `keywords` reads the column `{column}`, which is neither a string nor a list of "
                    f"strings in {_lines(odd)}",
                    field="stage.reward",
                    code="no_reward_column",
                )


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


def _lines(lines: Sequence[int]) -> str:
    shown = ", ".join(str(line) for line in lines[:SHOWN])
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"row{'s' if len(lines) > 1 else ''} {shown}{more}"
