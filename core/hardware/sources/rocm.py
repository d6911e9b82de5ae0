"""What amd-smi and rocm-smi say of AMD's GPUs: names, a second opinion on HIP's order, and the list itself where the
kernel's own is out of reach.

Their order is not HIP's (https://rocm.docs.amd.com/projects/amdsmi/en/latest/how-to/amdsmi-cli-tool.html): GPUs are
matched by the KFD number, then by PCI address. From ROCm 6.4 `amd-smi list -e` says HIP's number too. Since ROCm 7
`static`, `metric` and others wrap their list in {"gpu_data": […]}; values come as numbers, as text, as {"value",
"unit"} or as "N/A". Nothing here is taken on trust: what has another form is a notice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.hardware.device_mask import Gpu
from core.hardware.sources import tools
from core.hardware.sources.kfd import FoundGpus, ProcessUsage
from core.hardware.sources.live import Live
from core.hardware.tables.arch import gfx_name, lookup

LIST = ("list", "-e", "--json")
STATIC = ("static", "--asic", "--bus", "--vram", "--json")
METRIC = ("metric", "--mem-usage", "--json")
LIVE = ("metric", "--usage", "--mem-usage", "--temperature", "--power", "--json")
HEAT = ("hotspot", "edge")
POWER = ("socket_power", "current_socket_power", "average_socket_power")
PROCESS = ("process", "--json")
SHOW = ("--showproductname", "--showbus", "--showuniqueid", "--showmeminfo", "vram", "--json")
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
"""As amd-smi uses them: 196592 MB are an MI300X's 192 GiB."""
BDF = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$")


@dataclass(frozen=True, slots=True)
class ToolGpu:
    """One GPU as a tool has it. Empty, 0 or None: not said."""

    bdf: str = ""
    uuid: str = ""
    kfd_id: int = 0
    node: int = -1
    hip_id: int | None = None
    partition: int | None = None
    render: str = ""
    name: str = ""
    arch: str = ""
    memory_bytes: int = 0
    compute_units: int = 0


def ask(environ: Mapping[str, str], root: Path, seconds: float) -> tuple[list[ToolGpu], list[str]]:
    """(the GPUs, in the tool's order; notices), of amd-smi, or of rocm-smi where amd-smi is missing or says nothing."""
    notes: list[str] = []
    program = tools.find("amd-smi", environ, root)
    if program is not None:
        answer = tools.ask(program, LIST, environ, seconds)
        listed = _entries(answer, notes)
        # A tool that hangs in the driver would hang again.
        static = _entries(tools.ask(program, STATIC, environ, seconds), notes) if answer.status is not None else []
        by_number = {entry["gpu"]: entry for entry in static}
        if told := [_amd_smi(entry, by_number.get(entry["gpu"], {})) for entry in listed]:
            return told, notes
    program = tools.find("rocm-smi", environ, root)
    if program is not None:
        value, why = tools.as_json(tools.ask(program, SHOW, environ, seconds))
        if why is not None:
            notes.append(why)
        cards = [_table(card) for name, card in _table(value).items() if name.startswith("card")]
        return [_rocm_smi(card) for card in cards if card], notes
    return [], notes


def join(found: FoundGpus, told: list[ToolGpu], notes: list[str]) -> None:
    """Names from the tool for what the kernel lists; a notice where the two do not agree."""
    for at, gpu in enumerate(found.gpus):
        mine = [one for one in told if _same(one, gpu)]
        if not mine:
            if told:
                notes.append(f"GPU {gpu.index} ({gpu.name}): amd-smi or rocm-smi does not list it at {gpu.bdf}")
            continue
        one = mine[0]
        if one.name and gpu.name.startswith("AMD gfx"):
            part = f", partition {gpu.partition}" if gpu.partition is not None else ""
            found.gpus[at] = gpu = replace(gpu, name=one.name + part)
        if one.memory_bytes and not gpu.memory_bytes:
            found.gpus[at] = gpu = replace(gpu, memory_bytes=one.memory_bytes)
        if one.arch and one.arch != gpu.arch:
            notes.append(
                f"GPU {gpu.index} ({gpu.name}): amd-smi calls it {one.arch}, the kernel {gpu.arch}, which counts"
            )
        if one.hip_id is not None and one.hip_id != gpu.index and not (found.excluded or found.notes):
            notes.append(
                f"GPU {gpu.index} ({gpu.name}): amd-smi gives it HIP's number {one.hip_id}; the kernel's order counts"
            )


def listing(told: list[ToolGpu]) -> FoundGpus:
    """GPUs from a tool alone, in HIP's order as far as it is known: the kernel's list is out of reach."""
    order = sorted(range(len(told)), key=lambda at: (told[at].hip_id is None, told[at].hip_id or 0, told[at].node, at))
    shared = Counter(one.uuid for one in told if one.uuid)
    gpus = []
    for index, one in enumerate(told[at] for at in order):
        row = lookup(one.arch)
        partition = one.partition if shared[one.uuid] > 1 or one.partition else None
        uuid = one.uuid or f"BDF-{one.bdf}"
        gpus.append(
            Gpu(
                index=index,
                vendor="amd",
                uuid=uuid if partition is None else f"{uuid}-{partition}",
                bdf=one.bdf,
                name=one.name or f"AMD {one.arch or 'GPU'}",
                arch=one.arch,
                memory_bytes=one.memory_bytes,
                integrated=row.integrated if row else False,
                compute_units=one.compute_units,
                partition=partition,
                render=one.render,
                kfd_id=one.kfd_id,
                node=one.node,
            )
        )
    return FoundGpus(gpus, [], [])


def _same(one: ToolGpu, gpu: Gpu) -> bool:
    if one.kfd_id and gpu.kfd_id:
        return one.kfd_id == gpu.kfd_id
    return one.bdf == gpu.bdf


# --- the forms -----------------------------------------------------------------------------------------------


def _entries(answer: tools.ToolOutput, notes: list[str]) -> list[dict[str, Any]]:
    value, why = tools.as_json(answer)
    if why is not None:
        notes.append(why)
        return []
    if isinstance(value, dict):
        value = value.get("gpu_data", [value])
    return [entry for entry in map(_table, _list(value)) if isinstance(entry.get("gpu"), int)]


def _amd_smi(entry: dict[str, Any], static: dict[str, Any]) -> ToolGpu:
    asic, bus, vram = _table(static.get("asic")), _table(static.get("bus")), _table(static.get("vram"))
    partition = entry.get("partition_id")
    hip = entry.get("hip_id")
    return ToolGpu(
        bdf=_bdf(entry.get("bdf")) or _bdf(bus.get("bdf")),
        uuid=_words(entry.get("hip_uuid")),
        kfd_id=_number(entry.get("kfd_id")),
        node=_number(entry.get("node_id"), -1),
        hip_id=hip if isinstance(hip, int) else None,
        partition=partition if isinstance(partition, int) else None,
        render=_words(entry.get("render")),
        name=_words(asic.get("market_name")),
        arch=_arch(asic.get("target_graphics_version")),
        memory_bytes=_bytes(vram.get("size")),
        compute_units=_number(asic.get("num_compute_units")),
    )


def _rocm_smi(card: dict[str, Any]) -> ToolGpu:
    serial = _words(card.get("Unique ID")).lower().removeprefix("0x")
    # "Card Series" is a name; in older versions the name is under "Card series", and "Card Series" a number.
    names = [_words(card.get(key)) for key in ("Card Series", "Card series", "Card Model", "Card model")]
    return ToolGpu(
        bdf=_bdf(card.get("PCI Bus")),
        uuid=f"GPU-{serial.zfill(16)}" if re.fullmatch(r"[0-9a-f]{1,16}", serial) and int(serial, 16) else "",
        kfd_id=_number(card.get("GUID")),
        node=_number(card.get("Node ID"), -1),
        name=next((name for name in names if name and not name.startswith("0x")), ""),
        arch=_arch(card.get("GFX Version")),
        memory_bytes=_number(card.get("VRAM Total Memory (B)")),
    )


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(value: object) -> str:
    return "" if not isinstance(value, str) or value.strip() in ("", "N/A") else value.strip()


def _number(value: object, missing: int = 0) -> int:
    if isinstance(value, bool):
        return missing
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else missing


def _bytes(value: object) -> int:
    """{"value": 196592, "unit": "MB"}, "196592 MB", or a bare number of bytes."""
    if isinstance(value, dict):
        number, unit = value.get("value"), value.get("unit", "B")
    else:
        number, _, unit = str(value).partition(" ")
    scale = UNITS.get(str(unit) or "B", 0)
    return _number(number) * scale


def _bdf(value: object) -> str:
    words = _words(value).lower()
    return words if BDF.match(words) else ""


def _arch(value: object) -> str:
    """`gfx942`; some versions write KFD's number after the letters (`gfx9010` for gfx90a, `gfx90402`)."""
    words = _words(value).lower().partition(":")[0]
    digits = words.removeprefix("gfx")
    if not words.startswith("gfx") or lookup(words) is not None:
        return words if words.startswith("gfx") else ""
    if digits == "9010":
        return "gfx90a"
    return gfx_name(int(digits)) if digits.isdecimal() and len(digits) >= 5 else words


# --- use, now ------------------------------------------------------------------------------------------------


def usage(environ: Mapping[str, str], root: Path, seconds: float) -> tuple[dict[str, ProcessUsage], str | None]:
    """(use by PCI address, why not), of amd-smi; for where the kernel's files are out of reach."""
    program = tools.find("amd-smi", environ, root)
    if program is None:
        return {}, None
    notes: list[str] = []
    result: dict[str, ProcessUsage] = {}
    numbers: dict[int, ProcessUsage] = {}
    for one in _entries(tools.ask(program, LIST, environ, seconds), notes):
        if bdf := _bdf(one.get("bdf")):
            result[bdf] = numbers[one["gpu"]] = ProcessUsage()
    for entry in _entries(tools.ask(program, METRIC, environ, seconds), notes) if numbers else ():
        if (use := numbers.get(entry["gpu"])) is not None:
            use.used_bytes = _bytes(_table(entry.get("mem_usage")).get("used_vram")) or None
    for entry in _entries(tools.ask(program, PROCESS, environ, seconds), notes) if numbers else ():
        use = numbers.get(entry["gpu"], ProcessUsage())
        for item in map(_table, _list(entry.get("process_list"))):
            info = _table(item.get("process_info", item))  # with none, the words "No running processes detected"
            if _number(info.get("pid")):
                held = _bytes(_table(info.get("memory_usage")).get("vram_mem"))
                use.processes[_number(info["pid"])] = (
                    held or _bytes(info.get("vram_mem")) or _bytes(info.get("mem_usage"))
                )
    return result, notes[0] if notes else None


def live(environ: Mapping[str, str], root: Path, seconds: float) -> tuple[dict[str, Live], str | None]:
    """(activity by PCI address, why not), of amd-smi."""
    program = tools.find("amd-smi", environ, root)
    if program is None:
        return {}, None
    notes: list[str] = []
    places = {one["gpu"]: _bdf(one.get("bdf")) for one in _entries(tools.ask(program, LIST, environ, seconds), notes)}
    found: dict[str, Live] = {}
    for entry in _entries(tools.ask(program, LIVE, environ, seconds), notes) if places else ():
        if bdf := places.get(entry["gpu"]):
            busy = _percent(_table(entry.get("usage")).get("gfx_activity"))
            used = _table(entry.get("mem_usage")).get("used_vram")
            heat, power = _table(entry.get("temperature")), _table(entry.get("power"))
            celsius = next((value for name in HEAT if (value := _measured(heat.get(name))) is not None), None)
            watts = next((value for name in POWER if (value := _measured(power.get(name))) is not None), None)
            found[bdf] = Live(busy, None if used in (None, "N/A") else _bytes(used), celsius, watts)
    return found, notes[0] if notes else None


def _percent(value: object) -> int | None:
    percent = _measured(value)
    return percent if percent is not None and percent <= 100 else None


def _measured(value: object) -> int | None:
    """{"value": 12, "unit": "%"}, "12 %" or 12; 65535 is the firmware's word for: no such sensor."""
    if isinstance(value, dict):
        value = value.get("value")
    found = _number(value.partition(" ")[0] if isinstance(value, str) else value, -1)
    return found if 0 <= found < 65535 else None
