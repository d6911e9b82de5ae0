"""A clock around the steps of TRL's trainer."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Seconds from the beginning to the end of each step, data loading left out, and the process's processor seconds
    in them."""

    def __init__(self) -> None:
        self.seconds = self.processor_seconds = 0.0
        self._began = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._began[0]
        self.processor_seconds += time.process_time() - self._began[1]
