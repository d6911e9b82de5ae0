"""One thread a process: the tests run side by side, and threads that wait for one another spin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.interpreter import Run, interpreter

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Runs a function in a process whose Triton kernels are interpreted (tests/support/interpreter.py)."""
    with interpreter() as run:
        yield run
