"""AMD's GPUs as the kernel lists them: /sys/class/kfd, the first of the sources, and the one that HIP itself reads.

/sys/class/kfd/kfd/topology/nodes/N/{gpu_id,properties,mem_banks} (drivers/gpu/drm/amd/amdkfd/kfd_topology.c). HIP
numbers GPUs in the order of these nodes, leaving out those the process may not use. Memory is what amdgpu says of the
render node (https://docs.kernel.org/gpu/amdgpu/driver-misc.html); of a partition, whose render node has no such files,
what the node's memory banks say.

A card in partitions (MI300 and later: DPX, QPX, CPX) is one node a partition. The kernel tells them apart in
`location_id`: the function bits hold the partition's number, and in some versions bits 31 to 28 do. Their serial number
is the card's in some versions, so it is not enough for a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.hardware.device_mask import Excluded, Gpu
from core.hardware.sources import access
from core.hardware.sources.live import Live
from core.hardware.tables.arch import gfx_name, lookup

NODES = "class/kfd/kfd/topology/nodes"
PROCESSES = "class/kfd/kfd/proc"
TEMPERATURES = ("junction", "edge", "temp1_input")
POWERS = ("power1_average", "power1_input")
SENSORS = ("temp*_input", *POWERS)
"""Files of a card's folders `hwmon*`."""
FRAME_BUFFER = (1, 2)
"""heap_type of a memory bank on the card, visible to the CPU or not (HSA_MEM_HEAP_TYPE_FB_…)."""


@dataclass(slots=True)
class FoundGpus:
    """What a source says."""

    gpus: list[Gpu]
    excluded: list[Excluded]
    notes: list[str]


@dataclass(slots=True)
class ProcessUsage:
    """What is in use of a GPU's own memory, by anybody."""

    used_bytes: int | None = None
    """None: unknown, as for an AMD partition."""
    processes: dict[int, int] = field(default_factory=dict)
    """Bytes by process number. In a container the numbers may be the host's."""


def look(sysfs: Path, dev: Path, environ: Mapping[str, str]) -> FoundGpus | None:
    """GPUs in HIP's order; None where the kernel has no KFD (no AMD card, no driver, or a /sys that hides it)."""
    nodes = sysfs / NODES
    found = FoundGpus([], [], [])
    try:
        names = sorted((path for path in nodes.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    except FileNotFoundError:
        return None
    except OSError as error:
        found.notes.append(f"{nodes} cannot be read: {error.strerror}")
        return found
    nodes_found: list[_Node] = []
    for node in names:
        try:
            if int((node / "gpu_id").read_text().strip() or "0") == 0:
                continue  # a CPU
            nodes_found.append(_Node(node, _pairs((node / "properties").read_text()), sysfs))
        except PermissionError:
            # The kernel hides a node from a container that was not given its device; HIP does not count it either.
            found.notes.append(f"KFD node {node.name}: not readable; this container or user was not given that GPU")
        except (OSError, ValueError) as error:
            found.notes.append(f"KFD node {node.name}: {error}")
    for one in nodes_found:
        gpu = _gpu(len(found.gpus), one, [other for other in nodes_found if other.place == one.place])
        for device in (dev / "kfd", dev / "dri" / gpu.render):
            if (why := access.refusal(device, sysfs.parent, environ)) is not None:
                found.excluded.append(Excluded(replace(gpu, index=-1), f"{device} {why}", broken=True))
                break
        else:
            found.gpus.append(gpu)
    return found


class _Node:
    """A GPU's node, with its render node's device."""

    def __init__(self, folder: Path, properties: dict[str, int], sysfs: Path) -> None:
        self.folder, self.properties = folder, properties
        self.render = f"renderD{properties.get('drm_render_minor', 0)}"
        self.device = sysfs / "class/drm" / self.render / "device"
        self.location = properties.get("location_id", 0)
        self.place = properties.get("domain", 0), self.location & 0xFFF8
        """PCI domain, bus and slot: what partitions of one card share."""
        self.whole = (self.device / "mem_info_vram_total").exists()
        """A PCI device, of a card or of its first partition; the other partitions have a platform device."""


def _partition(one: _Node, siblings: list[_Node]) -> int | None:
    """Which part of its card a node is; None for a whole one. (Virtual functions of one slot are whole ones.)"""
    modes = {text(other.device / "current_compute_partition") for other in siblings} - {None, "", "SPX"}
    number = one.location >> 28 & 0xF or one.location & 0x7
    if not modes and all(other.whole for other in siblings):
        return None
    if not modes and len(siblings) == 1 and number == 0:
        return None  # its memory is reported nowhere, and nothing else is odd
    numbers = [other.location >> 28 & 0xF or other.location & 0x7 for other in siblings]
    return number if len(set(numbers)) == len(numbers) else siblings.index(one)


def _gpu(index: int, one: _Node, siblings: list[_Node]) -> Gpu:
    """`siblings`: the nodes at its place, itself among them."""
    properties, device = one.properties, one.device
    arch = gfx_name(properties.get("gfx_target_version", 0))
    row = lookup(arch)
    partition = _partition(one, siblings)
    bus, slot, function = one.location >> 8 & 0xFF, one.location >> 3 & 0x1F, one.location & 0x7
    bdf = f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function if partition is None else partition}"
    serial = properties.get("unique_id", 0)
    uuid = f"GPU-{serial:016x}" if serial else f"BDF-{bdf}"
    integrated = row.integrated if row else properties.get("cpu_cores_count", 0) > 0
    name = text(device / "product_name") or (f"AMD {arch}: {row.examples}" if row else f"AMD {arch}")
    return Gpu(
        index=index,
        vendor="amd",
        uuid=uuid if partition is None else f"{uuid}-{partition}",
        bdf=bdf,
        name=name if partition is None else _partition_name(name, partition, siblings),
        arch=arch,
        memory_bytes=_memory(one, integrated=integrated, partition=partition),
        integrated=integrated,
        compute_units=properties.get("simd_count", 0) // max(1, properties.get("simd_per_cu", 1)),
        partition=partition,
        render=one.render,
        kfd_id=_number(one.folder / "gpu_id"),
        node=int(one.folder.name),
    )


def _partition_name(name: str, partition: int, siblings: list[_Node]) -> str:
    """The card's files are with its first partition alone."""
    first = siblings[0].device
    modes = [mode for what in ("compute", "memory") if (mode := text(first / f"current_{what}_partition"))]
    how = f" ({', '.join(modes)})" if modes else ""
    of = f" of {len(siblings)}" if len(siblings) > 1 else ""
    return f"{text(first / 'product_name') or name}, partition {partition}{of}{how}"


def _memory(one: _Node, *, integrated: bool, partition: int | None) -> int:
    """Bytes that programs may use; 0: unknown."""
    total = 0
    if partition is None:  # the card's file says the whole card's, with the first partition too
        # An integrated GPU has no memory of its own beyond what the firmware sets aside; it may use main memory (GTT).
        heaps = ("mem_info_vram_total", "mem_info_gtt_total") if integrated else ("mem_info_vram_total",)
        total = sum(_number(one.device / heap) for heap in heaps)
    if total == 0:
        banks = sorted((one.folder / "mem_banks").glob("*/properties"))
        sizes = [_pairs(text(bank) or "") for bank in banks]
        total = sum(bank.get("size_in_bytes", 0) for bank in sizes if bank.get("heap_type") in FRAME_BUFFER)
    return total


# --- use, now ------------------------------------------------------------------------------------------------


def used_bytes(gpu: Gpu, sysfs: Path) -> int | None:
    """Bytes of the card's own memory in use by anybody; None where the kernel does not say, as of a partition."""
    if gpu.partition is not None:
        return None
    try:
        return int((sysfs / "class/drm" / gpu.render / "device/mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return None


def live(gpu: Gpu, sysfs: Path) -> Live:
    """Load, memory in use, temperature and power. A suspended card answers none of its sensors, which wakes nothing."""
    sensors = _sensors(gpu, sysfs)
    hottest = next((sensors[name] for name in TEMPERATURES if name in sensors), None)
    power = next((sensors[name] for name in POWERS if name in sensors), None)
    return Live(
        busy_percent(gpu, sysfs),
        used_bytes(gpu, sysfs),
        None if hottest is None else round(hottest / 1e3),
        None if power is None else round(power / 1e6),
    )


def _sensors(gpu: Gpu, sysfs: Path) -> dict[str, int]:
    """Readings by label (junction, edge), without one by the file's name: thousandths of a degree, millionths of a
    watt. Empty for a partition: the sensors are the whole card's."""
    found: dict[str, int] = {}
    if gpu.partition is not None or not gpu.render:
        return found
    folder = sysfs / "class/drm" / gpu.render / "device/hwmon"
    for path in sorted(path for name in SENSORS for path in folder.glob(f"hwmon*/{name}")):
        label = text(path.with_name(path.name.rpartition("_")[0] + "_label"))
        with suppress(OSError, ValueError):  # no such sensor on this card, or the card is suspended
            value = int(path.read_text())
            if value >= 0:
                found.setdefault(path.name if label is None or path.name.startswith("power") else label, value)
    return found


def busy_percent(gpu: Gpu, sysfs: Path) -> int | None:
    """0 to 100; None where the kernel does not say: an old driver, an APU without that sensor, a partition."""
    if gpu.partition is not None:
        return None
    try:
        percent = int((sysfs / "class/drm" / gpu.render / "device/gpu_busy_percent").read_text())
    except (OSError, ValueError):
        return None
    return percent if 0 <= percent <= 100 else None


def processes(gpu: Gpu, sysfs: Path) -> dict[int, int] | None:
    """Bytes of the card by process number, of those with a compute context; None where that cannot be read."""
    folder = sysfs / PROCESSES
    if not gpu.kfd_id or not folder.is_dir():
        return None
    found = {}
    for process in folder.iterdir():
        try:
            used = int((process / f"vram_{gpu.kfd_id}").read_text())
        except (OSError, ValueError):  # gone meanwhile, or not on this card
            continue
        if used > 0 and process.name.isdecimal():
            found[int(process.name)] = used
    return found


# --- files ---------------------------------------------------------------------------------------------------


def _pairs(content: str) -> dict[str, int]:
    pairs = (line.split() for line in content.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdecimal()}


def _number(path: Path) -> int:
    """0 where there is no such file, or no number in it."""
    words = text(path) or ""
    return int(words) if words.isdecimal() else 0


def text(path: Path) -> str | None:
    """The file's text; None when it cannot be had."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
