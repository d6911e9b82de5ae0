"""What waiting is, for the synchronous client. Its counterpart is eft/aio/io.py; both are kept by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

sleep = time.sleep


def run(work: Callable[[], T]) -> T:
    return work()
