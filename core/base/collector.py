"""Python's cyclic garbage collector, kept away from what a process imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_imports_are_frozen = False
"""Since `importing`; to ask Python would walk all of them."""


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a program. All that they make stays, so looking for garbage among it is in vain: while they
    run, which takes a fifth of their time, and later, half a second each time in a trainer."""
    gc.disable()
    try:
        yield
    finally:
        global _imports_are_frozen
        _imports_are_frozen = True
        gc.freeze()
        gc.enable()


@contextmanager
def standing() -> Iterator[None]:
    """Around a long loop: the collector does not walk what is there at its start. Where a program has frozen its
    imports, all stays frozen afterwards too: Python can only let go of everything at once, and each later collection
    would then walk the imports, for a third of a second. Such a program trains once, or small models."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not _imports_are_frozen:
            gc.unfreeze()
