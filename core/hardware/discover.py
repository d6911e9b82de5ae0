"""The GPUs of this box, without torch and without any driver library, from five sources.

AMD: the kernel's list (kfd.py), which HIP itself reads; amd-smi and rocm-smi (rocm.py) for names, as a second opinion
on the order, and in its place where /sys is out of reach. NVIDIA: nvidia-smi (nvidia.py). A source that says nothing,
or nonsense, is a notice; so is a card on the PCI bus that none of them lists (pci.py). Then what is inherited: masks
(visible.py), `--gpus`, and which GPUs are left out by default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.hardware.device_mask import ALL, CUDA, HIP, OCL, ROCR, Excluded, Gpu, HardwareError, unmasked, visible_env
from core.hardware.sources import access, kfd, nvidia, pci, rocm, tools
from core.hardware.sources.kfd import FoundGpus
from core.hardware.tables import faults
from core.hardware.tables.arch import lookup

__all__ = ["Box", "Excluded", "Gpu", "HardwareError", "discover", "visible_env"]

TINY_COMPUTE_UNITS = 4
"""The graphics of a desktop processor: enough for a screen, and known to fault on compute kernels."""
LARGE_APU_COMPUTE_UNITS = 32
"""From here on an integrated GPU that is not in WORTH_SERVING is meant for work."""
WORTH_SERVING = frozenset({"gfx1151"})
"""Integrated GPUs that are served, whatever their size, where there is no other: Strix Halo."""
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


@dataclass(frozen=True, slots=True)
class Box:
    """What a worker may serve. No GPU: one CPU slot."""

    gpus: list[Gpu]
    notes: list[str]
    """What was left out, and why, and what a source said wrongly: for the worker's log and for the doctor."""
    excluded: list[Excluded] = field(default_factory=list)
    """What was left out; `notes` has their words."""
    lost: list[str] = field(default_factory=list)
    """Those of `notes` that say why a GPU of this box cannot be used."""


def discover(
    sysfs: Path = Path("/sys"),
    environ: Mapping[str, str] = os.environ,
    gpus: list[int] | None = None,
    dev: Path | None = None,
    seconds: float = tools.SECONDS,
) -> Box:
    """The GPUs this process may serve, in order, after any inherited mask.

    `gpus` (from `--gpus 0,1`) picks by ordinal as a program under the inherited mask would count, integrated ones
    included; without it, integrated GPUs that are not made for such work are left out. `dev` lies beside `sysfs`.
    `seconds`: what each of the drivers' programs may take.
    Raises HardwareError when the mask or `gpus` names one that is not there.
    """
    root = sysfs.parent
    unhidden = {name: value for name, value in environ.items() if name not in ALL}
    amd = _amd(sysfs, dev or root / "dev", unhidden, seconds)
    nvidia_found = nvidia.look(unhidden, root, seconds)
    excluded = [*amd.excluded, *nvidia_found.excluded]
    notes = [*amd.notes, *nvidia_found.notes]
    masks = dict(environ)
    if amd.gpus and nvidia_found.gpus:
        masks.pop(CUDA, None)  # on such a box it is meant for the NVIDIA cards
    left, more = unmasked(amd.gpus, masks)
    notes += more
    left += unmasked(nvidia_found.gpus, environ)[0]
    everything = amd.gpus + nvidia_found.gpus
    idle = pci.idle(sysfs, [gpu.bdf for gpu in [*everything, *(one.gpu for one in excluded)]], unhidden)
    notes += [one.words for one in idle]
    if not everything:
        _refuse_idle_masks(environ, notes + [one.words for one in excluded])
    excluded += [Excluded(gpu, "hidden by the environment") for gpu in everything if gpu not in left]
    if amd.gpus and (override := environ.get(OVERRIDE)):
        notes.append(f"{OVERRIDE}={override}: programs take every AMD GPU for another architecture than it is")

    if gpus is not None:
        chosen = _chosen(gpus, left, notes + [one.words for one in excluded])
    else:
        chosen = []
        for ordinal, gpu in enumerate(left):
            if reason := _unfit(gpu, left):
                excluded.append(Excluded(gpu, f"left out, {reason}; --gpus {ordinal} takes it"))
            else:
                chosen.append(gpu)
    for gpu in chosen:
        if why := _hopeless(gpu):
            notes.append(f"GPU {gpu.index} ({gpu.name}): served because --gpus names it, and {why}")
        if lookup(gpu.arch) is None:
            arch = gpu.arch or "its architecture is not known, and so"
            notes.append(f"GPU {gpu.index} ({gpu.name}): {arch} is not in the table of architectures; no bf16 there")
    lost = [one.words for one in idle if one.broken] + [one.words for one in excluded if one.broken]
    return Box(chosen, notes + [one.words for one in excluded], excluded, lost)


def _amd(sysfs: Path, dev: Path, environ: Mapping[str, str], seconds: float) -> FoundGpus:
    found = kfd.look(sysfs, dev, environ)
    if found is not None and not (found.gpus or found.excluded or found.notes):
        return found  # the kernel knows AMD's driver and no AMD card
    told, notes = rocm.ask(environ, sysfs.parent, seconds)
    if found is not None and (found.gpus or found.excluded or not told):
        rocm.join(found, told, notes)
        found.notes += notes
        return found
    listed = rocm.listing(told)
    listed.notes = (found.notes if found is not None else []) + notes
    if listed.gpus:
        listed.notes.append("the kernel's list of AMD GPUs cannot be read here: they are as amd-smi or rocm-smi say")
        for gpu in list(listed.gpus):
            for device in (dev / "kfd", *([dev / "dri" / gpu.render] if gpu.render else [])):
                if (why := access.refusal(device, sysfs.parent, environ)) is not None:
                    listed.gpus.remove(gpu)
                    listed.excluded.append(Excluded(gpu, f"{device} {why}", broken=True))
                    break
    return listed


def _chosen(ordinals: list[int], left: list[Gpu], notes: list[str]) -> list[Gpu]:
    if len(set(ordinals)) != len(ordinals):
        raise HardwareError(f"--gpus {','.join(map(str, ordinals))} names a GPU twice")
    for ordinal in ordinals:
        if not 0 <= ordinal < len(left):
            there = ", ".join(f"{number} ({gpu.name})" for number, gpu in enumerate(left)) or "none"
            because = f" ({'; '.join(notes)})" if notes else ""
            raise HardwareError(f"--gpus names GPU {ordinal}, which is not there; there are: {there}{because}")
    return [left[ordinal] for ordinal in ordinals]


def _refuse_idle_masks(environ: Mapping[str, str], notes: list[str]) -> None:
    """A mask that asks for a GPU on a box without one is a mistake, not a wish for the CPU."""
    for name in (ROCR, HIP, CUDA, OCL):
        value = environ.get(name, "").strip()
        if value and not value.startswith("-"):
            because = f" ({'; '.join(notes)})" if notes else ""
            raise HardwareError(
                f"{name}={value} asks for a GPU, and none was found{because}; unset it, or set it to -1 for the CPU"
            )


def _unfit(gpu: Gpu, among: list[Gpu]) -> str | None:
    """Reason why a GPU that `--gpus` does not name is not served; None: it is served."""
    if gpu.vendor == "nvidia":
        return None
    if why := _hopeless(gpu):
        return why
    if 0 < gpu.compute_units <= TINY_COMPUTE_UNITS:
        return f"it has {gpu.compute_units} compute units and is made for a screen"
    if not gpu.integrated:
        return None
    if any(not other.integrated for other in among):
        return "it is integrated, and there are others"
    if gpu.arch not in WORTH_SERVING and gpu.compute_units < LARGE_APU_COMPUTE_UNITS:
        return f"it is integrated, with {gpu.compute_units} compute units"
    return None


def _hopeless(gpu: Gpu) -> str | None:
    return next((f"{fault.what} ({fault.key})" for fault in faults.known(gpu.arch) if fault.hopeless), None)
