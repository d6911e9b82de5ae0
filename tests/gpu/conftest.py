"""These tests are collected on a machine with a GPU (CUDA or ROCm) and nowhere else: `python -m pytest tests/gpu`.

`EFT_TEST_DEVICE=cpu` collects them anywhere, to try the tests themselves.
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() or "EFT_TEST_DEVICE" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(os.environ.get("EFT_TEST_DEVICE", "cuda"))
