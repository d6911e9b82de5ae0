"""One thread a process: the tests run side by side, and threads that wait for one another spin."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
