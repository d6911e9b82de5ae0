"""Tokens that a job adds to its model (`method.new_tokens`), in the tokenizer.

Their rows of embedding and head are rows.py's, whose imports take four times as long as all others of a process that
renders rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AddedToken

from core.errors import SpecError

NEW = "method.new_tokens"


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add those that the tokenizer does not have. They are ordinary tokens: rows may spell them, and decoded text shows
    them."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token not in known])


def require_new(tokenizer: Any, tokens: Sequence[str]) -> None:
    """SpecError for a token that the model's own tokenizer has already."""
    known = tokenizer.get_vocab()
    if there := [token for token in tokens if token in known]:
        raise SpecError(f"the model already has the token `{there[0]}`: remove it from `new_tokens`", field=NEW)


def ids_of(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Numbers of the new tokens."""
    found: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    return found
