"""These tests run where torch's CUDA build stands over a runtime of ours: `make rehearsal`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.rehearsal.environment import INSIDE

HERE = os.environ.get(INSIDE, "no rehearsal: run these tests with `make rehearsal`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, with the reason, where the environment is not there."""
    if HERE != "yes":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=HERE))


@pytest.fixture(scope="session")
def blocks_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with six blocks: enough for slots and buffers to be used again."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model") / "six"
    shutil.copytree(tiny_dir, folder)
    config = AutoConfig.from_pretrained(tiny_dir, num_hidden_layers=6)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
