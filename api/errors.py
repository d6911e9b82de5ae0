"""Errors of the API itself, and the words for them. api/http/errors.py renders them."""

from __future__ import annotations

import difflib

from core.errors import EftError


class BadRequest(EftError):
    """The request itself is wrong: a parameter, a header, its encoding."""

    code = "invalid_request"
    status = 422


class UnsupportedMediaType(EftError):
    code = "unsupported_media_type"
    status = 415


class RangeNotSatisfiable(EftError):
    code = "range_not_satisfiable"
    status = 416


class Gone(EftError):
    """The database knows it, the disk no longer has it."""

    code = "gone"
    status = 410


class RequestTimeout(EftError):
    code = "timeout"
    status = 408


class ServiceUnavailable(EftError):
    """Something behind the API is down; the same request may go through in a moment."""

    code = "unavailable"
    status = 503


class RateLimited(EftError):
    """Too many requests; `retry_after` whole seconds later there is room for one."""

    code = "rate_limited"
    status = 429

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def nearest(word: str, options: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), options, n=1, cutoff=0.5)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known here: " + ", ".join(f"`{option}`" for option in options)


def printable(text: str) -> str:
    """A user's text inside a message: short, and with nothing in it that a terminal would obey."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[:80])
    return safe + ("…" if len(text) > 80 else "")
