"""Where a run computes, in which precision, with how many threads."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch

from core.spec.runtime import Resources
from core.spec.training import Full, LoRA, Method, QLoRA

Precision = Literal["auto", "bf16", "fp32"]


class DeviceMissing(RuntimeError):
    """The slot promised a GPU and there is none: a fault of the machine, not of the job."""


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    device_name: str
    arch: str
    """`gfx942`, `sm_90` or `cpu`."""
    weights: torch.dtype
    """Of the base model while it trains."""
    autocast: torch.dtype | None
    """Of matrix products, when that is not the weights' own."""
    threads: int
    notice: str | None
    """Why the precision is not what was asked for."""

    @property
    def precision(self) -> str:
        return "bf16" if self.autocast is torch.bfloat16 else "fp32"

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.type,
            "device_name": self.device_name,
            "arch": self.arch,
            "precision": self.precision,
            "weights_dtype": str(self.weights).removeprefix("torch."),
            "threads": self.threads,
        }


def place(resources: Resources, precision: Precision, method: Method) -> Placement:
    """Choose for the one visible device, and set threads and deterministic kernels for this process.

    bf16 runs compute matrix products in bf16 under autocast. What is trained is always float32: full fine-tuning keeps
    float32 weights, LoRA holds the frozen base in bf16 (or packed) and the adapter in float32.
    """
    threads = _set_threads()
    device = _device(resources)
    arch, name = _arch(device), _device_name(device)
    bf16, notice = _bf16(precision, device, arch)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    autocast = torch.bfloat16 if bf16 else None
    match method:
        case Full():
            weights = torch.float32
        case LoRA() | QLoRA():
            weights = torch.bfloat16 if bf16 else torch.float32
        case _ as never:
            assert_never(never)
    return Placement(device, name, arch, weights, autocast, threads, notice)


def _set_threads() -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
    return torch.get_num_threads()


def _device(resources: Resources) -> torch.device:
    here = torch.cuda.is_available()
    match resources.accelerator:
        case "cpu":
            return torch.device("cpu")
        case "gpu" if not here:
            raise DeviceMissing("this job needs a GPU, but torch sees none here")
        case "gpu" | "any":
            return torch.device("cuda", 0) if here else torch.device("cpu")
        case _ as never:
            assert_never(never)


def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _bf16(precision: Precision, device: torch.device, arch: str) -> tuple[bool, str | None]:
    """(compute in bf16?, why not). On a CPU without bf16 instructions it works, slowly: then `auto` takes fp32."""
    if device.type == "cuda":
        from core.hardware.arch import supports_bf16

        able = supports_bf16(arch)
        reason = f"{arch} has no bf16: computing in fp32"
    else:
        able = precision == "bf16" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        reason = "this CPU has no bf16 instructions: computing in fp32"
    match precision:
        case "fp32":
            return False, None
        case "bf16" | "auto":
            return able, None if able else reason
        case _ as never:
            assert_never(never)
