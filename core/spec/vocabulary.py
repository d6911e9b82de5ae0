"""What a job's document may say, as a set of words: every field and every value of every choice.

A resolved job has every default written out and unknown fields are errors, so a reader of jobs must know every word
of the writer. Words are only ever added, so a reader that is newer than the writer knows them all.
"""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from core.spec.job import JobSpec


@cache
def words() -> frozenset[str]:
    """E.g. `SingleDevice.gpus`, `SingleDevice.accelerator=cpu`."""
    found: set[str] = set()
    seen: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [JobSpec]
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            found.add(f"{model.__name__}.{name}")
            for part in _parts(field.annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    waiting.append(part)
                elif isinstance(part, str):
                    found.add(f"{model.__name__}.{name}={part}")
    return frozenset(found)


def digest(of: frozenset[str] | None = None) -> str:
    """SHA-256 of the words, in hexadecimal."""
    return hashlib.sha256("\n".join(sorted(words() if of is None else of)).encode()).hexdigest()


def _parts(annotation: Any) -> Iterator[Any]:
    """Classes, and the strings of literals, at whatever depth of unions, lists and annotations."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        yield from (value for value in typing.get_args(annotation) if isinstance(value, str))
    elif origin is not None or isinstance(annotation, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part)
    elif isinstance(annotation, type):
        yield annotation
