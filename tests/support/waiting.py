"""Is the device waited for within a training step? A `Stop` that looks from the second step of a run on.

On a GPU PyTorch itself raises at every wait (`torch.cuda.set_sync_debug_mode`). A CPU has no queue; there the operators
are counted that a GPU would have to be waited for: a value that Python asks for, and a shape that depends on values.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.train.base.stop import Stop
from tests.support.trainer import events

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Watching(Stop):
    """Never asks to leave. `calls`: what was waited for between the end of the first step and that of the last."""

    def __init__(self, run_dir: Path, device: torch.device, last_step: int) -> None:
        self.run_dir, self.device, self.last_step = run_dir, device, last_step
        self.calls: Counter[str] = Counter()
        self.steps = 0
        """How many were watched."""
        self._mode: Counting | None = None

    @property  # type: ignore[override]
    def requested(self) -> bool:
        done = len(events(self.run_dir, "metrics"))
        if self._mode is None and 1 <= done < self.last_step - 1:
            self._began, self._mode = done, Counting()
            self._mode.__enter__()
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
        elif self._mode is not None and done >= self.last_step - 1:
            self.steps = done - self._began
            self.close()
        return False

    def close(self) -> None:
        if self._mode is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self._mode.__exit__(None, None, None)
        self.calls, self._mode = self._mode.calls, None
