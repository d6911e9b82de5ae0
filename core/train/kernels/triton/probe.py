"""Whether Triton can be used on a device. Nothing here imports it before a device asks."""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from importlib import import_module

import torch

log = logging.getLogger("eft.train.kernels")

OLDEST = (3, 2)
"""Oldest version of Triton: that of torch 2.6. These kernels have been compiled by 3.2.0, 3.5.1 and 3.9.0."""


class TritonUnavailable(Exception):
    """Triton is not used; the message says why."""


@cache
def unavailable(device: torch.device) -> str | None:
    """Why Triton is not used on the device, or None when it is: it can be imported, it knows the device, and what it
    compiles for it gives the portable backend's bits. Tried once a process (about a second, where Triton has not kept
    the compiled kernel)."""
    try:
        _import(device)
        _try_out(device)
    except TritonUnavailable as reason:
        log.warning("Triton is not used on %s: %s", device, reason)
        return str(reason)
    return None


def version() -> str:
    """Version of the library in use."""
    return str(import_module("triton").__version__)


def _import(device: torch.device) -> None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise TritonUnavailable("on a CPU it runs in its interpreter alone (TRITON_INTERPRET=1), for tests")
    try:
        triton = import_module("triton")
    except (ImportError, OSError) as error:
        raise TritonUnavailable(f"this build of torch comes without it, or it cannot be loaded: {error}") from error
    found = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if found < OLDEST:
        raise TritonUnavailable(f"version {triton.__version__} is older than {OLDEST[0]}.{OLDEST[1]}")
    if device.type == "cpu":
        return
    wanted = "hip" if torch.version.hip else "cuda"
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError as error:
        raise TritonUnavailable(f"it finds no driver: {error}") from error
    if target.backend != wanted:
        raise TritonUnavailable(f"it is built for {target.backend}, and torch for {wanted}")


def _try_out(device: torch.device) -> None:
    from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4

    weight = quantize_nf4(torch.randn(300 * 64 + 37, generator=torch.Generator().manual_seed(0)))
    packed, scales = weight.packed.to(device), [scale.to(device) for scale in weight.scales]
    ours, wanted = (torch.empty(300 * 64 + 37, dtype=torch.bfloat16, device=device) for _ in range(2))
    dequantize_nf4_into(wanted, packed, scales, 64)
    try:
        import_module("core.train.kernels.triton.nf4").dequantize_into(ours, packed, scales, 64)
        same = torch.equal(ours, wanted)
    except Exception as error:  # what a compiler, its launcher's C compiler and a driver raise has no common class
        raise TritonUnavailable(f"its first kernel failed: {type(error).__name__}: {error}") from error
    if not same:
        raise TritonUnavailable("its NF4 differs from torch's on this device")
