"""Which attention kernels a run may use: what was asked for, what the architecture should have, what passed its test.

PyTorch picks among its kernels call by call (`scaled_dot_product_attention`); here it is told which ones it may pick
from. Without a self-test that is all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from core.errors import SpecError
from core.hardware.selftest import ATTENTION, Choice, Dtype
from core.hardware.tables.arch import lookup
from core.hardware.tables.attention import libraries_for
from core.train.attention import packed

Wanted = Literal["auto", "flash", "cudnn", "efficient", "math", "eager"]
KERNELS = ("flash", "efficient", "math")


@dataclass(frozen=True, slots=True)
class Attention:
    """What a run computes attention with."""

    allowed: tuple[str, ...]
    """Among torch's kernels; empty with `eager`."""
    eager: bool
    cudnn: bool
    """Whether torch may pick cuDNN's kernels: where they were asked for and passed, or nothing was tested."""
    libraries: tuple[str, ...]
    """Libraries that passed the self-test, best first."""
    asked_cudnn: bool
    varlen_veto: str | None
    """Why packed rows do not take the variable-length kernel, where that is known before it is tried."""
    notice: str | None
    """In words: what was asked for or is to be expected, and is not to be had."""

    def apply(self) -> None:
        """Set it for this process; whatever an earlier run in it has set is gone."""
        cuda: Any = torch.backends.cuda
        anything = not self.allowed
        cuda.enable_flash_sdp(anything or "flash" in self.allowed)
        cuda.enable_mem_efficient_sdp(anything or "efficient" in self.allowed)
        cuda.enable_math_sdp(anything or "math" in self.allowed)
        cuda.enable_cudnn_sdp(self.cudnn)
        packed.Varlen.veto, packed.Varlen.libraries = self.varlen_veto, self.libraries
        packed.Varlen.by, packed.Varlen.padded = None, False

    def fit(self, model: nn.Module) -> None:
        """Give the model its own plain attention, where that is chosen. SpecError when it has no such form."""
        if not self.eager:
            return
        try:
            model.set_attn_implementation("eager")  # type: ignore[operator]
        except (AttributeError, ValueError, NotImplementedError) as error:
            raise SpecError(
                f"this model cannot compute attention in plain operations: {error}; take `attention: auto`",
                field="training.attention",
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """For the run record."""
        kernels = ["eager"] if self.eager else [*(["cudnn"] if self.asked_cudnn else []), *self.allowed]
        return {"kernels": kernels} | ({"libraries": list(self.libraries)} if self.libraries else {})


def choose_attention(wanted: Wanted, arch: str, precision: Dtype, choice: Choice) -> Attention:
    """See Attention. SpecError when nothing that passed is left."""
    tested = choice.attention.get(precision)
    passed: Sequence[str] = ATTENTION if tested is None else tested
    kernels = tuple(kernel for kernel in KERNELS if kernel in passed)
    here = choice.libraries.get(precision, ())
    asked_cudnn = wanted == "cudnn" and "cudnn" in here
    veto = choice.veto.get("varlen")
    if tested is not None and veto is None and "flash" not in passed:
        veto = "flash attention is not to be had on this device"
    notice = None
    match wanted:
        case "auto":
            allowed, eager = kernels, not kernels
            notice = _below_expectation(arch, precision, passed) if tested is not None else None
        case "eager":
            allowed, eager = (), "eager" in passed
            if not eager:
                raise _nothing(precision)
        case "cudnn":
            allowed, eager = kernels, not kernels
            if not asked_cudnn:
                notice = f"no self-test of this device has passed cuDNN's attention in {precision}"
        case "math" | "flash" | "efficient":
            last = tuple(kernel for kernel in ("math", "efficient") if kernel in passed)[:1]
            allowed = (wanted, *last) if wanted in passed and wanted != "math" else last
            if wanted not in passed:
                allowed = allowed or kernels
                notice = f"{wanted} attention is not to be had on this device in {precision}"
            eager = not allowed
    if eager and "eager" not in passed:
        raise _nothing(precision)
    if set(allowed) == {"flash"} and arch != "cpu" and "eager" in passed:
        allowed, eager = (), True
        notice = "GPUs' flash kernels take no mask of padding, and of those that do only the plain form is right here"
    if notice is not None:
        notice += f": it is computed by {', '.join(allowed) or 'eager'}"
    return Attention(
        allowed=() if eager else tuple(kernel for kernel in KERNELS if kernel in allowed),
        eager=eager,
        cudnn=asked_cudnn or (tested is None and wanted == "auto"),
        asked_cudnn=asked_cudnn,
        libraries=_library_names(arch, here) if wanted in ("auto", "flash") else (),
        varlen_veto=veto,
        notice=notice,
    )


def _library_names(arch: str, passed: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.name for row in libraries_for(arch, passed))


def _nothing(precision: Dtype) -> SpecError:
    return SpecError(
        f"no form of attention computes correctly on this device in {precision}, as its self-test found",
        field="training.attention",
    )


def _below_expectation(arch: str, precision: Dtype, passed: Sequence[str]) -> str | None:
    """On this architecture faster kernels are known to work than passed here."""
    row = lookup(arch)
    if row is None or (precision == "fp32" and row.vendor != "cpu"):  # GPUs' flash kernels take 16 bits
        return None
    expected = {"flash": "flash", "opt_in": "flash", "efficient": "efficient", "math": "math"}[row.attention]
    if expected in passed:
        return None
    return f"{arch} should have {expected} attention, and it is not to be had here"
