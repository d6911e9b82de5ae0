"""The GPUs of this box, without torch and without any driver library: sysfs for AMD, nvidia-smi for NVIDIA.

AMD: /sys/class/kfd/kfd/topology/nodes/N/{gpu_id,properties} (drivers/gpu/drm/amd/amdkfd/kfd_topology.c). HIP numbers
GPUs in the order of these nodes, leaving out those the process may not use; memory is what amdgpu says of the render
node (https://docs.kernel.org/gpu/amdgpu/driver-misc.html). amd-smi's order is another one, so it is not asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.hardware.arch import gfx_name, lookup
from core.hardware.visible import CUDA, HIP, OCL, ROCR, Gpu, HardwareError, unmasked, visible_env

__all__ = ["Box", "Gpu", "HardwareError", "discover", "visible_env"]

NODES = "class/kfd/kfd/topology/nodes"
TINY_COMPUTE_UNITS = 4
"""The graphics of a desktop processor: enough for a screen, and known to fault on compute kernels."""
LARGE_APU_COMPUTE_UNITS = 32
"""From here on an integrated GPU is meant for work (Strix Halo)."""
NVIDIA_QUERY = "index,uuid,name,memory.total,compute_cap,pci.bus_id"
NVIDIA_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Box:
    """What a worker may serve. No GPU: one CPU slot."""

    gpus: list[Gpu]
    notes: list[str]
    """What was left out, and why: for the worker's log and for the doctor."""


def discover(
    sysfs: Path = Path("/sys"),
    environ: Mapping[str, str] = os.environ,
    gpus: list[int] | None = None,
    dev: Path | None = None,
) -> Box:
    """The GPUs this process may serve, in order, after any inherited mask.

    `gpus` (from `--gpus 0,1`) picks by ordinal as a program under the inherited mask would count, integrated ones
    included; without it, integrated GPUs that are not made for such work are left out. `dev` lies beside `sysfs`.
    Raises HardwareError when the mask or `gpus` names one that is not there.
    """
    amd, notes = _amd(sysfs, dev or sysfs.parent / "dev")
    nvidia, more = _nvidia(environ)
    notes += more
    masks = dict(environ)
    if amd and nvidia:
        masks.pop(CUDA, None)  # on such a box it is meant for the NVIDIA cards
    left, more = unmasked(amd, masks)
    notes += more
    left += unmasked(nvidia, environ)[0]
    if not amd and not nvidia:
        _refuse_idle_masks(environ, notes)
    notes += [f"GPU {gpu.index} ({gpu.name}): hidden by the environment" for gpu in amd + nvidia if gpu not in left]

    if gpus is not None:
        chosen = _chosen(gpus, left, notes)
    else:
        chosen = []
        for gpu in left:
            if reason := _too_small(gpu):
                notes.append(f"GPU {gpu.index} ({gpu.name}): left out, {reason}; --gpus {left.index(gpu)} takes it")
            else:
                chosen.append(gpu)
    for gpu in chosen:
        if lookup(gpu.arch) is None:
            notes.append(
                f"GPU {gpu.index} ({gpu.name}): {gpu.arch} is not in the table of architectures; no bf16 there"
            )
    return Box(chosen, notes)


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


def _too_small(gpu: Gpu) -> str | None:
    if gpu.vendor == "nvidia":
        return None
    if 0 < gpu.compute_units <= TINY_COMPUTE_UNITS:
        return f"it has {gpu.compute_units} compute units and is made for a screen"
    if gpu.integrated and gpu.compute_units < LARGE_APU_COMPUTE_UNITS:
        return f"it is integrated, with {gpu.compute_units} compute units"
    return None


def _amd(sysfs: Path, dev: Path) -> tuple[list[Gpu], list[str]]:
    found: list[Gpu] = []
    notes: list[str] = []
    nodes = sysfs / NODES
    if not nodes.is_dir():
        return [], []
    for node in sorted((path for path in nodes.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        try:
            if int(_text(node / "gpu_id") or "0") == 0:
                continue  # a CPU
            properties = _properties(node / "properties")
        except PermissionError:
            # The kernel hides a node from a container that was not given its device; HIP does not count it either.
            notes.append(f"KFD node {node.name}: not readable; this container or user was not given that GPU")
            continue
        render = f"renderD{properties.get('drm_render_minor', 0)}"
        for device in (dev / "kfd", dev / "dri" / render):
            if not os.access(device, os.R_OK | os.W_OK, effective_ids=True):
                how = "is missing (docker: --device /dev/kfd --device /dev/dri)"
                if device.exists():
                    how = "may not be opened: the user must be in the groups render and video"
                notes.append(f"KFD node {node.name}: {device} {how}")
                break
        else:
            found.append(_amd_gpu(len(found), properties, sysfs / "class/drm" / render / "device"))
    return found, notes


def _amd_gpu(index: int, properties: dict[str, int], device: Path) -> Gpu:
    arch = gfx_name(properties.get("gfx_target_version", 0))
    row = lookup(arch)
    location = properties.get("location_id", 0)
    bus, slot, function = location >> 8, (location >> 3) & 0x1F, location & 0x7
    bdf = f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}"
    serial = properties.get("unique_id", 0)
    integrated = row.integrated if row else properties.get("cpu_cores_count", 0) > 0
    # An integrated GPU has no memory of its own beyond what the firmware sets aside; it may use main memory (GTT) too.
    heaps = ("mem_info_vram_total", "mem_info_gtt_total") if integrated else ("mem_info_vram_total",)
    product = _text(device / "product_name")
    return Gpu(
        index=index,
        vendor="amd",
        uuid=f"GPU-{serial:016x}" if serial else f"BDF-{bdf}",
        bdf=bdf,
        name=product or (f"AMD {arch}: {row.examples}" if row else f"AMD {arch}"),
        arch=arch,
        memory_bytes=sum(int(_text(device / heap) or "0") for heap in heaps),
        integrated=integrated,
        compute_units=properties.get("simd_count", 0) // max(1, properties.get("simd_per_cu", 1)),
        render=device.parent.name,
    )


def _nvidia(environ: Mapping[str, str]) -> tuple[list[Gpu], list[str]]:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return [], []
    command = [program, f"--query-gpu={NVIDIA_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [f"nvidia-smi did not answer: {error}"]
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip() or f"exit status {done.returncode}"
        return [], [f"nvidia-smi failed: {said}"]
    found: list[Gpu] = []
    notes: list[str] = []
    for line in filter(None, (line.strip() for line in done.stdout.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdecimal():
            notes.append(f"nvidia-smi: {line}")
            continue
        index, uuid, name, mebibytes, capability, bus = fields
        arch = f"sm_{capability.replace('.', '')}"
        row = lookup(arch)
        found.append(
            Gpu(
                index=int(index),
                vendor="nvidia",
                uuid=uuid,
                bdf=bus[-12:].lower(),  # nvidia-smi writes eight digits of domain
                name=name,
                arch=arch,
                memory_bytes=int(mebibytes) << 20 if mebibytes.isdecimal() else 0,
                integrated=row.integrated if row else False,
            )
        )
    return found, notes


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdecimal()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
