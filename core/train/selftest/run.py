"""All parts for a device, in order: what a later one stands on comes first."""

from __future__ import annotations

import math
from typing import Any

import torch

from core.train.base.out_of_memory import is_out_of_memory
from core.train.selftest import attention, kernels, products
from core.train.selftest.measure import NotAvailable, SelftestCheck


def checks(device: torch.device) -> list[SelftestCheck]:
    return [*products.checks(device), *attention.checks(device), *kernels.checks(device)]


def about(device: torch.device) -> dict[str, str]:
    """What was tried, as torch names it."""
    built = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device_name": name, "torch": torch.__version__, "runtime": built if device.type == "cuda" else "cpu"}


class NoMemory(Exception):
    """The device, or the host, has no memory left for a part. That says nothing about how the device computes."""


def measure(check: SelftestCheck, device: torch.device) -> dict[str, Any]:
    """One part as its verdict (core/hardware/selftest.Part). An exception is a verdict too; a crash is the parent's.
    Raises NoMemory."""
    try:
        measured = check.run(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a fault of a kernel belongs to the part that launched it
    except NotAvailable as reason:
        return {"status": "unavailable", "error": str(reason)}
    except Exception as error:  # whatever a library raises: that is what this is here to find
        if is_out_of_memory(error):
            raise NoMemory((str(error).splitlines() or ["out of memory"])[0][:300]) from error
        return {"status": "failed", "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
    gap = measured.difference if math.isfinite(measured.difference) else 1e300
    return {
        "status": "passed" if gap <= measured.tolerance else "failed",
        "difference": gap,
        "tolerance": measured.tolerance,
        "why": measured.why,
    }
