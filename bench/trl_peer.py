"""What the benches against TRL share: a quiet configuration, a clock around its steps, and rows in a given order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]


def config(folder: str | Path, **more: Any) -> SFTConfig:
    """bf16, neither logs nor checkpoints, no activation checkpointing; `more` says the rest, or otherwise."""
    asked: dict[str, Any] = {
        "output_dir": str(folder), "gradient_checkpointing": False, "logging_strategy": "no", "save_strategy": "no",
        "report_to": "none", "use_cpu": not torch.cuda.is_available(), "bf16": True, "disable_tqdm": True,
    }  # fmt: skip
    return SFTConfig(**asked | more)


class Clock(TrainerCallback):
    """Seconds from the beginning to the end of each step, data loading left out."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._began


class InOrder(SFTTrainer):
    """Rows as the data set has them."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)
