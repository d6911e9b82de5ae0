"""The random number generators of a process, as tensors and JSON: torch (CPU and its GPU), Python, numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

GPU = "cuda.0"
"""The process's own, whichever number it has: of several ranks each sees all their GPUs, and computes on one."""


def seed_all(seed: int) -> None:
    """Start every generator from one seed (numpy takes 32 bits of it)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON): what `restore_rng` takes."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[GPU] = torch.cuda.get_rng_state()
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return tensors, {
        "python": [version, list(internal), gauss],
        "numpy": [int(position), int(has_gauss), float(cached)],
    }


def restore_rng(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Continue every generator where `capture_rng` saw it; a GPU's is left out where there is none."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and GPU in tensors:
        torch.cuda.set_rng_state(tensors[GPU])
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    position, has_gauss, cached = numbers["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
