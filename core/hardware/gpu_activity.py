"""What GPUs do at this moment: load, memory in use, temperature and power, for dashboards.

AMD: amdgpu's files of the render node (https://docs.kernel.org/gpu/amdgpu/thermal.html, `gpu_busy_percent` and `hwmon`,
and driver-misc.html, `mem_info_vram_used`), amd-smi where they are out of reach; NVIDIA: nvidia-smi. Reading files
costs nothing; amd-smi takes a second of a core, so the caller says how often. An unknown figure is None, never
0: the file of an APU may be there and answer EOPNOTSUPP, and a partition or a MIG slice has no figures of its own, only
its card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from core.hardware.device_mask import Gpu
from core.hardware.sources import kfd, nvidia, rocm
from core.hardware.sources.live import NOTHING, Live


def look(
    gpus: Sequence[Gpu], sysfs: Path, environ: Mapping[str, str], seconds: float, *, amd_smi: bool
) -> tuple[dict[str, Live], list[str]]:
    """(figures by UUID, of the GPUs with any known figure; why others have none).

    `amd_smi`: it may be asked, where the kernel's files say nothing. `seconds`: what each program may take.
    """
    whole = [gpu for gpu in gpus if gpu.partition is None]
    found: dict[str, Live] = {}
    why: list[str] = []
    unseen = []
    for gpu in (gpu for gpu in whole if gpu.vendor == "amd"):
        found[gpu.uuid] = kfd.live(gpu, sysfs)
        if found[gpu.uuid] == NOTHING:
            unseen.append(gpu)
    if unseen and amd_smi:
        told, failed = rocm.live(environ, sysfs.parent, seconds)
        found |= {gpu.uuid: told[gpu.bdf] for gpu in unseen if gpu.bdf in told}
        why += [] if failed is None else [failed]
    if any(gpu.vendor == "nvidia" for gpu in whole):
        shown, failed = nvidia.live(environ, sysfs.parent, seconds)
        found |= {gpu.uuid: shown[gpu.uuid] for gpu in whole if gpu.uuid in shown}
        why += [] if failed is None else [failed]
    return {uuid: live for uuid, live in found.items() if live != NOTHING}, why
