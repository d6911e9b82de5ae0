"""Where a run computes, in which precision, by which attention, with how many threads."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any, assert_never

import torch

from core.hardware import device_mask
from core.hardware.precision import TF32, against_fp8, choose_precision
from core.hardware.selftest import Choice, Dtype
from core.hardware.tables import faults
from core.hardware.tables.faults import Limits
from core.spec.axes.method import OFT, Full, LoRA, QLoRA, SettledMethod
from core.spec.axes.runtime import Resources
from core.spec.axes.training import Training
from core.train.attention.backends import Attention, choose_attention
from core.train.quant import fp8

COMPUTE: dict[Dtype, torch.dtype | None] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
UNTRIED = Choice()


class DeviceMissing(RuntimeError):
    """The slot promised a GPU and there is none: a fault of the machine, not of the job."""


class DeviceRefused(RuntimeError):
    """The self-test says that nothing computes rightly there: a fault of the machine, not of the job."""


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    device_name: str
    arch: str
    """`gfx942`, `sm_90` or `cpu`."""
    precision: Dtype
    fp8: bool
    """Dense linear layers multiply in 8-bit floats."""
    weights: torch.dtype
    """Dtype of the base model's weights while it trains."""
    attention: Attention
    tf32: bool
    limits: Limits
    """Limits of matrix products: known faults of the architecture, and what the self-test found."""
    threads: int
    notice: str | None
    """Why the precision is not what was asked for."""
    notices: tuple[tuple[str, str], ...] = ()
    """(code, words) of whatever else is not as it was asked for, or as the hardware should be."""

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of matrix products, where that is not fp32."""
        return COMPUTE[self.precision]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.type,
            "device_name": self.device_name,
            "arch": self.arch,
            "precision": "fp8" if self.fp8 else self.precision,
            "weights_dtype": str(self.weights).removeprefix("torch."),
            "attention": self.attention.as_dict(),
            "tf32": self.tf32,
            "threads": self.threads,
        }


def place(
    resources: Resources, training: Training, method: SettledMethod, choice: Choice = UNTRIED, *, local_rank: int = 0
) -> Placement:
    """Choose for the visible device with this number, and set threads, attention kernels, TF32 and deterministic
    kernels for this process. `choice` is what the device's self-test leaves. SpecError when that rules out what was
    asked for.

    Matrix products are computed under autocast in 16 bits, or in fp32. What is trained is always float32: full
    fine-tuning keeps float32 weights, LoRA holds the frozen base in 16 bits (or packed) and the adapter in float32.
    """
    if choice.refused is not None:
        raise DeviceRefused(f"the self-test of this device refuses it: {choice.refused}")
    threads = _set_threads()
    device = _device(resources, local_rank)
    arch, name = _arch(device), _device_name(device)
    precision, in_fp8, notice = _precision(training, device, arch, choice)
    attention = choose_attention(training.attention, arch, precision, choice)
    attention.apply()
    tf32, told = _set_tf32(training.tf32, arch)
    if device.type == "cuda":
        _take_deterministic_kernels()
    match method:
        case Full():
            weights = torch.float32
        case LoRA() | QLoRA() | OFT():
            weights = COMPUTE[precision] or torch.float32
        case _ as never:
            assert_never(never)
    notices = [("attention_fallback", attention.notice)] if attention.notice else []
    notices += [("tf32_unavailable", told)] if told else []
    return Placement(
        device=device,
        device_name=name,
        arch=arch,
        precision=precision,
        fp8=in_fp8,
        weights=weights,
        attention=attention,
        tf32=tf32,
        limits=faults.limits(arch, os.environ).tighter(choice.limits),
        threads=threads,
        notice=notice,
        notices=tuple(notices),
    )


def _take_deterministic_kernels() -> None:
    """Have torch take the deterministic form of an operation wherever there is one, and warn where there is none.

    By default it then also fills every `torch.empty` with NaN. Nothing here reads memory that it has not written, and
    the buffers of the chunked loss are hundreds of MiB a micro-step, so that is off.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _set_threads() -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
    return torch.get_num_threads()


def _device(resources: Resources, local_rank: int) -> torch.device:
    here = torch.cuda.is_available()
    if here and resources.accelerator != "cpu":
        if local_rank >= (count := torch.cuda.device_count()):
            raise DeviceMissing(f"this is rank {local_rank}, counted from 0, and torch sees {count} GPUs here")
        torch.cuda.set_device(local_rank)
    match resources.accelerator:
        case "cpu":
            return torch.device("cpu")
        case "gpu" if not here:
            raise DeviceMissing("this job needs a GPU, but torch sees none here")
        case "any" if not here and (promise := _promise()) is not None:
            raise DeviceMissing(f"{promise} names a GPU, and torch {torch.__version__} sees none here")
        case "gpu" | "any":
            return torch.device("cuda", local_rank) if here else torch.device("cpu")
        case _ as never:
            assert_never(never)


def _promise() -> str | None:
    """The variable that shows this process a GPU, as `NAME=value`: the slot has one, or the person who runs this
    by hand expects one. To train on the CPU then would be slow in silence."""
    for name in device_mask.ALL:
        value = os.environ.get(name, "").strip()
        if value and not value.startswith("-"):
            return f"{name}={value}"
    return None


def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _precision(training: Training, device: torch.device, arch: str, choice: Choice) -> tuple[Dtype, bool, str | None]:
    """(of products, of dense layers in fp8?, why it is not what was asked for)."""
    wanted = "bf16" if training.precision == "fp8" else training.precision
    precision, notice = choose_precision(wanted, arch, fast_bf16=_fast_bf16(device, arch), usable=choice.precisions)
    if training.precision != "fp8":
        return precision, False, notice
    reason = against_fp8(arch, installed=fp8.installed(), found=choice.fp8)
    if reason is None and precision == "bf16":
        return precision, True, None
    told = "; ".join(filter(None, (reason and f"{reason}: no fp8, computing in {precision}", notice)))
    return precision, False, told


def _fast_bf16(device: torch.device, arch: str) -> bool:
    """Whether there are instructions for it. A CPU without them computes in it too, slowly."""
    if device.type == "cuda":
        from core.hardware.tables.arch import supports_bf16

        return supports_bf16(arch)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _set_tf32(wanted: bool, arch: str) -> tuple[bool, str | None]:
    """(whether products of fp32 numbers take it now, why not). Always set: off unless asked for."""
    able = arch in TF32
    on = wanted and able
    if torch.version.hip:
        # Older builds of torch for ROCm read it once, before the first product, and take no TF32 without it.
        os.environ["HIPBLASLT_ALLOW_TF32"] = "1" if on else "0"
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on
    return on, f"{arch} has no TF32: fp32 products are computed in full" if wanted and not able else None
