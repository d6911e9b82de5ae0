"""What a caller did wrong: it is answered, and the session goes on as if the operation had not been asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from core.errors import EftError, plainly


class BadOperation(EftError):
    """An operation that cannot be computed as it was asked."""

    code = "invalid_operation"
    status = 422


class NoSuchModel(BadOperation):
    """The session has no adapter of that name."""

    code = "session_model_not_found"


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around the reading of an adapter's files, which may have been made, or broken, elsewhere. BadOperation for files
    that cannot be read."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        told = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            told = f"{'.'.join(map(str, first['loc']))}: {plainly(first['msg'])}"
        words = f"the adapter in {folder.name} cannot be read: {told}"
        raise BadOperation(words, field="folder") from error


def check_finite(numbers: Sequence[Tensor]) -> None:
    """BadOperation where what a pass came to is no finite number, which no caller can compute with."""
    if not all(bool(one.isfinite().all()) for one in numbers):
        words = (
            "the loss or a log-probability is NaN or infinite: an array has too large numbers, or the weights have "
            "diverged"
        )
        raise BadOperation(words, code="diverged")
