"""The program of the reward `math`. It is run by its source, in the sandbox, and imports nothing of ours."""

from __future__ import annotations

import logging
import re
from decimal import Decimal, InvalidOperation
from typing import Any

MARKS = ("$", "\\boxed", "\\(", "\\[", "\\begin")
"""A text with one of these says itself where its mathematics is."""
COMMAND = re.compile(r"\\(?:text|math|operatorname)[a-z]*\s*\{[^{}]*\}|\\[A-Za-z]+|(?<=\d)\s*[A-Za-z]+\s*$")
"""What LaTeX reads as it is meant, and the unit behind a number, which math-verify drops."""
PROSE = re.compile(r"(?!sqrt)\b(?:[A-Za-z]{3,}|pi)\b")
"""Words that LaTeX would read as products of their letters."""


def readable(expected: list[str]) -> list[bool]:
    """Whether each expected answer can be read."""
    return [bool(_alone(one)) for one in expected]


def verify(answer: str, expected: str, alone: bool) -> float:
    """1.0 where an answer is mathematically what is expected, else 0.0. `alone`: the answer has nothing around it."""
    import math_verify

    found = _alone(answer) if alone else math_verify.parse(answer, parsing_timeout=None)
    return float(math_verify.verify(_alone(expected), found, timeout_seconds=None))


def warm() -> None:
    """Fill the parsers' tables, which every answer would fill anew otherwise."""
    logging.disable(logging.CRITICAL)  # math-verify warns that the time limit is left to the sandbox
    for text in ("\\frac{1}{2}", "x^2-1", "(1, 2]", "\\{1, 2\\}", "\\sqrt{2}", "x = 5", "1,234"):
        verify(f"The answer is ${text}$.", text, alone=False)
    verify("(x - 1)(x + 1)", "x^2 - 1", alone=True)
    verify("The answer is 0.5.", "1/2", alone=False)


def _alone(text: str) -> list[Any]:
    """Read a text that is mathematics as a whole, unless it says where its mathematics is. [] where it is neither."""
    import math_verify

    if not any(mark in text for mark in MARKS):
        if PROSE.search(COMMAND.sub(" ", text)):
            return []
        text = f"${_without_exponent(text)}$"
    found: list[Any] = math_verify.parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    return found


def _without_exponent(text: str) -> str:
    """A number such as 1e5 without its exponent, which LaTeX would read as a product with Euler's number."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return text
    return f"{number:f}" if number.is_finite() and abs(number.adjusted()) < 400 else text
