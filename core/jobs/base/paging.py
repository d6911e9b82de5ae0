"""Pages of lists that grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import EftError

T = TypeVar("T")


class UnknownCursor(EftError):
    """`after` names nothing in this list: page one would be a wrong answer, and an endless loop for some clients."""

    code = "unknown_cursor"
    status = 400


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[T]):
    """Newest first. `has_more` says whether a next page exists."""

    items: Sequence[T]
    has_more: bool
