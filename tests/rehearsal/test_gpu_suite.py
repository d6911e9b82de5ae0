"""The tests of tests/gpu that need a GPU's memory and streams, and no kernel of a vendor: the same functions, here."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_kernels import (  # noqa: F401
    test_chunked_loss_is_the_full_one,
    test_dequantises_to_the_cpus_bits,
    test_lora_linear_is_the_cpus,
)
from tests.gpu.test_waiting import test_no_step_waits_for_the_device  # noqa: F401


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
