"""What requests may hold: texts, names, times and cells, each with its bounds in one place."""

from __future__ import annotations

import unicodedata
from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

MOST_WHOLE = 2**63 - 1
"""What a column of 64 bits holds."""
FIRST_YEAR, LAST_YEAR = 1970, 2200
"""Times that people mean. Those at the ends of what Python counts cannot be moved to another time zone."""
TOGETHER = {"HIRAGANA", "KATAKANA", "CJK", "HANGUL", "BOPOMOFO", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"}
"""Scripts that are written side by side, and with Latin letters (UTS 39, highly restrictive)."""


def shown(text: str) -> str:
    """Raises ValueError for what a terminal would obey or a reader could not see."""
    if not text.isprintable():
        raise ValueError("only printable characters: no control characters, no invisible ones, no half of a pair")
    return text


def trimmed(text: str) -> str:
    if text != shown(text).strip():
        raise ValueError("no spaces at the ends")
    return text


def unmistakable(name: str) -> str:
    """A name that looks like no other. Raises ValueError."""
    plain = unicodedata.normalize("NFKC", trimmed(name))
    if plain != name:
        raise ValueError(f"write it as `{plain}`: other characters that look the same would make another name")
    scripts = {_script(char) for char in name if char.isalpha()}
    if len(scripts) > 1 and not scripts <= TOGETHER | {"LATIN"}:
        raise ValueError(f"letters of one script in a name, not of {' and '.join(sorted(scripts)).lower()}")
    return name


def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split(" ", 1)[0]


def century(moment: datetime) -> datetime:
    """In UTC where it names no zone. Raises ValueError for a time that nobody means."""
    if not FIRST_YEAR < moment.year < LAST_YEAR:
        raise ValueError(f"a time between {FIRST_YEAR + 1} and {LAST_YEAR - 1}")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError("a time with its timezone, e.g. `2099-12-31T18:00:00+01:00`")
    return century(moment)


def _day(day: date) -> date:
    if not FIRST_YEAR <= day.year < LAST_YEAR:
        raise ValueError(f"a day between {FIRST_YEAR} and {LAST_YEAR - 1}")
    return day


def _iso(value: Any) -> Any:
    """pydantic takes a number for the seconds since 1970."""
    if isinstance(value, str) and value.count("-") < 2:
        raise ValueError("a day or a time in ISO 8601, e.g. `2026-11-21` or `2026-11-21T09:20:55Z`")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(shown)]
"""The name of an existing object."""
Words = Annotated[str, StringConstraints(max_length=500), AfterValidator(shown)]
"""A reason, for people."""
Slot = Annotated[str, StringConstraints(min_length=1, max_length=400), AfterValidator(shown)]
"""NODE/INDEX, as people name GPUs."""
Whole = Annotated[int, Field(ge=0, le=MOST_WHOLE)]
Moment = Annotated[datetime, AfterValidator(aware)]
QueryMoment = Annotated[datetime, BeforeValidator(_iso), AfterValidator(century)]
QueryDay = Annotated[date, BeforeValidator(_iso), AfterValidator(_day)]


def cell(value: Any) -> Any:
    """For a CSV: a spreadsheet takes a text that begins so for a formula, and runs it
    (https://owasp.org/www-community/attacks/CSV_Injection)."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
