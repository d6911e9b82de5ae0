"""Around a library that reads a model's files: what it raises is their fault, whatever it is called there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import EftError, ModelError
from core.train.base.disk import disk_full
from core.train.base.out_of_memory import is_out_of_memory

SHOWN = 500
"""Characters of what the library says."""


@contextmanager
def reading(what: str, *, field: str = "model") -> Iterator[None]:
    """ModelError (`model_unreadable`) for whatever is raised within. Want of memory and a full disk stay what they are,
    and so do errors that say already whose they are."""
    try:
        yield
    except (EftError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if is_out_of_memory(error) or disk_full(error):
            raise
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        words = " ".join(str(error).split())
        shown = words if len(words) <= SHOWN else f"{words[:SHOWN]}…"
        raise ModelError(
            f"{what} cannot be read: {type(error).__name__}: {shown}", field=field, code="model_unreadable"
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust (tokenizers, safetensors) panicked. Its error is no Exception."""
    return type(error).__name__ == "PanicException"
