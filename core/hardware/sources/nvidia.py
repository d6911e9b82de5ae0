"""NVIDIA's GPUs, as nvidia-smi lists them; a card in MIG mode as its slices.

A MIG device is a GPU of its own to CUDA, one a process, and goes by its UUID: `CUDA_VISIBLE_DEVICES=MIG-…`
(https://docs.nvidia.com/datacenter/tesla/mig-user-guide/). A card in MIG mode without slices computes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from core.hardware.device_mask import Excluded, Gpu
from core.hardware.sources import tools
from core.hardware.sources.kfd import FoundGpus, ProcessUsage
from core.hardware.sources.live import Live
from core.hardware.tables.arch import lookup

QUERY = ("--query-gpu=index,uuid,name,memory.total,compute_cap,pci.bus_id", "--format=csv,noheader,nounits")
MIG_QUERY = ("--query-gpu=index,mig.mode.current", "--format=csv,noheader")
APPS_QUERY = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
USED_QUERY = ("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
LIVE_QUERY = (
    "--query-gpu=uuid,utilization.gpu,memory.used,temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
)
LIST = ("-L",)
MIG_CAPABLE = frozenset({"sm_80", "sm_90", "sm_100", "sm_103", "sm_120"})
CARD_LINE = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
SLICE_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")


def look(environ: Mapping[str, str], root: Path, seconds: float) -> FoundGpus:
    """GPUs in nvidia-smi's order."""
    found = FoundGpus([], [], [])
    program = tools.find("nvidia-smi", environ, root)
    if program is None:
        return found
    answer = tools.ask(program, QUERY, environ, seconds)
    if answer.failed is not None:
        found.notes.append(answer.failed)
        return found
    for line in filter(None, (line.strip() for line in answer.output.splitlines())):
        gpu = _card(line)
        if gpu is None:
            found.notes.append(f"nvidia-smi: not understood: {line[:120]}")
        else:
            found.gpus.append(gpu)
    if any(gpu.arch in MIG_CAPABLE for gpu in found.gpus):
        _divide(found, program, environ, seconds)
    return found


def _card(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 6 or not fields[0].isdecimal() or not fields[1].startswith("GPU-"):
        return None
    index, uuid, name, mebibytes, capability, bus = fields
    arch = f"sm_{capability.replace('.', '')}"
    row = lookup(arch)
    return Gpu(
        index=int(index),
        vendor="nvidia",
        uuid=uuid,
        bdf=bus[-12:].lower(),  # nvidia-smi writes eight digits of domain
        name=name,
        arch=arch,
        memory_bytes=int(mebibytes) << 20 if mebibytes.isdecimal() else 0,
        integrated=row.integrated if row else False,
    )


def _divide(found: FoundGpus, program: str, environ: Mapping[str, str], seconds: float) -> None:
    """Put the slices of each card in MIG mode in its place."""
    answer = tools.ask(program, MIG_QUERY, environ, seconds)
    if answer.failed is not None:  # a driver older than MIG
        found.notes.append(f"whether a card is in MIG mode is not known: {answer.failed}")
        return
    rows = [[field.strip() for field in line.split(",")] for line in answer.output.splitlines()]
    divided = {int(row[0]) for row in rows if len(row) == 2 and row[0].isdecimal() and row[1] == "Enabled"}
    if not divided:
        return
    answer = tools.ask(program, LIST, environ, seconds)
    if answer.failed is not None:
        found.notes.append(answer.failed)
    slices = _slices(answer.output)
    gpus, found.gpus = found.gpus, []
    for gpu in gpus:
        if gpu.index not in divided:
            found.gpus.append(gpu)
        elif parts := slices.get(gpu.uuid):
            found.gpus += [_slice(gpu, *part) for part in parts]
        else:
            found.excluded.append(
                Excluded(
                    gpu,
                    f"it is in MIG mode and has no slices: make some (`nvidia-smi mig -i {gpu.index} -cgi … -C`) or "
                    f"leave the mode (`nvidia-smi -i {gpu.index} -mig 0`)",
                    broken=True,
                )
            )


def _slices(listing: str) -> dict[str, list[tuple[str, int, str]]]:
    """(profile, number, UUID) of the slices of each card, from `nvidia-smi -L`."""
    result: dict[str, list[tuple[str, int, str]]] = {}
    card = ""
    for line in listing.splitlines():
        if match := CARD_LINE.match(line):
            card = match[2]
        elif (match := SLICE_LINE.match(line)) and card:
            result.setdefault(card, []).append((match[1], int(match[2]), match[3]))
    return result


def _slice(card: Gpu, profile: str, number: int, uuid: str) -> Gpu:
    """Its memory is what the profile's name says (`3g.40gb`), in units of 10⁹ bytes: a little less than there is."""
    size = re.search(r"(\d+)gb", profile)
    return replace(
        card,
        uuid=uuid,
        name=f"{card.name} MIG {profile}",
        memory_bytes=int(size[1]) * 10**9 if size else 0,
        partition=number,
        parent=card.uuid,
    )


def processes(
    environ: Mapping[str, str], root: Path, seconds: float = tools.SECONDS
) -> tuple[dict[str, dict[int, int]], str | None]:
    """(bytes by process number by UUID, why not). A process on a MIG device is listed under that one's UUID."""
    result: dict[str, dict[int, int]] = {}
    rows, why = _ask(APPS_QUERY, environ, root, seconds)
    for uuid, pid, held in (row for row in rows if len(row) == 3 and row[1].isdecimal()):
        result.setdefault(uuid, {})[int(pid)] = int(held) << 20 if held.isdecimal() else 0  # [N/A]: not known
    return result, why


def usage(environ: Mapping[str, str], root: Path, seconds: float) -> tuple[dict[str, ProcessUsage], str | None]:
    """(use by UUID, why not)."""
    rows, why = _ask(USED_QUERY, environ, root, seconds)
    result = {row[0]: ProcessUsage(int(row[1]) << 20) for row in rows if len(row) == 2 and row[1].isdecimal()}
    if why is not None:
        return result, why
    running, why = processes(environ, root, seconds)
    for uuid, held in running.items():
        result.setdefault(uuid, ProcessUsage()).processes = held
    return result, why


def live(environ: Mapping[str, str], root: Path, seconds: float) -> tuple[dict[str, Live], str | None]:
    """(activity by UUID, why not). `[N/A]` and `[Not Supported]` are None."""
    rows, why = _ask(LIVE_QUERY, environ, root, seconds)
    found = {}
    for uuid, *words in (row for row in rows if len(row) == 5 and row[0].startswith("GPU-")):
        percent, mebibytes, celsius, watts = (_number(word) for word in words)
        busy = percent if percent is not None and percent <= 100 else None
        found[uuid] = Live(busy, None if mebibytes is None else mebibytes << 20, celsius, watts)
    return found, why


def _number(words: str) -> int | None:
    """The whole number nearest to `88` or `123.45`; None for `[N/A]`, `[Unknown Error]` and the like."""
    try:
        value = float(words)
    except ValueError:
        return None
    return round(value) if math.isfinite(value) and value >= 0 else None


def _ask(
    query: tuple[str, ...], environ: Mapping[str, str], root: Path, seconds: float
) -> tuple[list[list[str]], str | None]:
    program = tools.find("nvidia-smi", environ, root)
    if program is None:
        return [], None
    answer = tools.ask(program, query, environ, seconds)
    if answer.failed is not None:
        return [], answer.failed
    return [[field.strip() for field in line.split(",")] for line in answer.output.splitlines()], None
