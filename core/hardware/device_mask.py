"""The four variables that hide GPUs: read once at a worker's start, written once for every child.

How they add up on ROCm (https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html, and clr's device start-up):
ROCR_VISIBLE_DEVICES filters first and renumbers what is left from 0; HIP_VISIBLE_DEVICES, or when that is not set
CUDA_VISIBLE_DEVICES, then counts among those. So the same number in two of them may leave nothing. A child gets
exactly one of the four, counted from the whole box, and the other three are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from core.errors import EftError

ROCR, HIP, CUDA, OCL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
ALL = (ROCR, HIP, CUDA, OCL)
NO_GPU = "-1"
"""In CUDA_VISIBLE_DEVICES this hides every GPU from CUDA, and from HIP too where no other variable is set. (An empty
HIP_VISIBLE_DEVICES would not do: HIP takes it for unset.)"""


class HardwareError(EftError):
    """The worker's settings for GPUs do not fit the box. It must not start on a guess."""

    code = "gpus_unavailable"
    status = 500


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as this box numbers it without any mask."""

    index: int
    """HIP's or nvidia-smi's ordinal."""
    vendor: Literal["amd", "nvidia"]
    uuid: str
    """`GPU-…`, or `MIG-…` for a slice of NVIDIA's, unique in the world; `GPU-…-3` for a partition of AMD's, since
    some drivers give it the card's own; `BDF-…`, unique on this box only, for a card that has no serial number."""
    bdf: str
    """PCI address, `0000:03:00.0`."""
    name: str
    arch: str
    """`gfx942`, `sm_90`: see arch.py."""
    memory_bytes: int
    """What programs may use in all; 0 when the driver does not say."""
    integrated: bool = False
    compute_units: int = 0
    """0 when the driver does not say."""
    partition: int | None = field(default=None, compare=False)
    """Which part of a divided card: AMD's partition, NVIDIA's MIG device. None: a whole card."""
    parent: str = field(default="", compare=False)
    """UUID of the card that a MIG device is a part of."""
    render: str = field(default="", compare=False)
    """Name of its render node below /sys/class/drm and /dev/dri, `renderD128`; empty for NVIDIA's."""
    kfd_id: int = field(default=0, compare=False)
    """AMD: the driver's own number, in /sys/class/kfd/kfd/proc/*/vram_<kfd_id>. 0: not known."""
    node: int = field(default=-1, compare=False)
    """AMD: its KFD node. -1: not known."""

    @property
    def visible_variable(self) -> str:
        return HIP if self.vendor == "amd" else CUDA

    @property
    def visible_value(self) -> str:
        """NVIDIA's cards go by UUID, since CUDA's ordinals are not nvidia-smi's where cards differ."""
        return str(self.index) if self.vendor == "amd" else self.uuid


@dataclass(frozen=True, slots=True)
class Excluded:
    """A GPU that is here and is not served."""

    gpu: Gpu
    reason: str
    """With the way to have it served, where there is one."""
    broken: bool = False
    """Something is wrong with the box or its container; else it is left out by choice."""

    @property
    def words(self) -> str:
        which = f"GPU {self.gpu.index}" if self.gpu.index >= 0 else f"the GPU at {self.gpu.bdf}"
        return f"{which} ({self.gpu.name}): {self.reason}"


def visible_env(environ: Mapping[str, str], gpu: Gpu | None, *beside: Gpu) -> dict[str, str]:
    """A copy of `environ` in which a child sees `gpu` alone, or no GPU at all (None: a CPU slot), by one variable.

    `beside`: further GPUs of a job of several, of the same vendor; the child numbers them in the order given. All its
    ranks see all of them, as torchrun has it, since peers reach each other's memory only where they see each other.
    """
    result = {name: value for name, value in environ.items() if name not in ALL}
    if gpu is None:
        result[CUDA] = NO_GPU
    else:
        result[gpu.visible_variable] = ",".join(one.visible_value for one in (gpu, *beside))
    return result


def unmasked(cards: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[list[Gpu], list[str]]:
    """(what an inherited mask leaves of the box's `cards`, in its order; notes). `cards` are of one vendor.

    Raises HardwareError when a mask names a card that is not there, or one twice.
    """
    if not cards:
        return [], []
    if cards[0].vendor == "nvidia":
        return _apply_cuda(environ.get(CUDA), list(cards)), []
    notes = []
    left = _apply(ROCR, environ.get(ROCR), list(cards))
    given = [name for name in (HIP, CUDA, OCL) if name in environ]
    if len({environ[name] for name in given}) > 1:
        notes.append(f"{' and '.join(given)} differ; {given[0]} counts")
    if given:
        left = _apply(given[0], environ[given[0]], left, renumbered=ROCR in environ)
    return left, notes


def _apply(
    variable: str, value: str | None, cards: list[Gpu], *, renumbered: bool = False, given: str = ""
) -> list[Gpu]:
    """`given`: how the operator wrote `value`."""
    if value is None:
        return cards
    given = given or value
    result: list[Gpu] = []
    for word in (word.strip() for word in value.split(",") if word.strip()):
        if re.fullmatch(r"-\d+", word):
            break  # hides everything from here on
        card = _find(word, cards)
        if card is None:
            after = f", counted after {ROCR}, which renumbers from 0: set only one of the two" if renumbered else ""
            there = ", ".join(f"{number} ({card.uuid})" for number, card in enumerate(cards)) or "none"
            raise HardwareError(f"{variable}={given} names GPU {word}, which is not there{after}; there are: {there}")
        if card in result:
            raise HardwareError(f"{variable}={given} names GPU {word} twice")
        result.append(card)
    return result


def _apply_cuda(value: str | None, cards: list[Gpu]) -> list[Gpu]:
    """As `_apply`. On a box in MIG mode a number is nvidia-smi's of a card, and a word that names a card stands for all
    of its slices."""
    if value is None or not any(card.parent for card in cards):
        return _apply(CUDA, value, cards)
    slices: dict[str, list[str]] = {}
    for card in cards:
        slices.setdefault(card.parent or card.uuid, []).append(card.uuid)
    fronts = [replace(card, uuid=card.parent or card.uuid) for card in cards]
    words = []
    for word in (word.strip() for word in value.split(",") if word.strip()):
        named = {front.uuid for front in fronts if str(front.index) == word}
        if word.lower().startswith("gpu-"):
            named = {uuid for uuid in slices if uuid.lower().startswith(word.lower())}
        words += slices[named.pop()] if len(named) == 1 else [f"GPU-{word}" if word.isdecimal() else word]
    return _apply(CUDA, ",".join(words), cards, given=value)


def _find(word: str, cards: list[Gpu]) -> Gpu | None:
    """By ordinal, or by UUID as the drivers spell it (an unambiguous beginning will do for CUDA)."""
    if word.isdecimal():
        return cards[int(word)] if int(word) < len(cards) else None
    if not word.lower().startswith(("gpu-", "mig-")):
        return None
    found = [card for card in cards if card.uuid.lower().startswith(word.lower())]
    return found[0] if len(found) == 1 else None
