"""The doctor's part about GPUs: which there are, what is known against them, who uses them, how the self-test went."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from box.doctor import software
from box.doctor.report import Report
from core.hardware import installed, selftest
from core.hardware.discover import Box, Gpu, HardwareError, discover
from core.hardware.selftest import Verdict
from core.hardware.sources import kfd, nvidia, rocm
from core.hardware.sources.kfd import ProcessUsage
from core.hardware.tables import determinism, faults, wheels
from core.hardware.tables.arch import lookup, precision
from core.settings import Settings
from core.storage.layout import Layout

GIB = 1 << 30
FULL = 0.05
"""Share of a card's memory in use by others above which the report mentions it."""


def look(report: Report, settings: Settings, environ: Mapping[str, str], seconds: float) -> None:
    """`seconds`: what each of the drivers' programs may take."""
    try:
        chosen = None if settings.gpus is None else list(settings.gpus)
        box = discover(settings.sysfs, environ, chosen, seconds=seconds)
    except HardwareError as error:
        report.add("problem", "gpus", error.message)
        return
    # A box whose GPUs are all kept from us is no box without GPUs: jobs would crawl on the CPU without a reason shown.
    lost = set() if box.gpus else set(box.lost)
    for note in box.notes:
        report.add("problem" if note in lost else "note", "gpus", note)
    try:
        verdicts = _verdicts(settings)
    except OSError as error:  # the data root is the service's, and this is somebody else
        verdicts = {}
        report.add("note", "gpus", f"what the self-tests found is not known: {error.filename}: {error.strerror}")
    if not box.gpus:
        cores = len(os.sched_getaffinity(0))
        slots = settings.cpu_slots
        report.add("ok", "gpus", f"none: jobs train on the CPU ({cores} cores), {slots} at a time")
        cpus = [verdict for slot, verdict in verdicts.items() if slot.startswith("cpu")]  # of several slots the first's
        _self_test(report, "cpu", max(cpus, key=lambda verdict: verdict.checked_at, default=None))
    usage = _usage(report, box, settings.sysfs, environ, seconds)
    report.gpus = [_gpu(report, gpu, environ, usage[gpu.uuid], verdicts.get(gpu.uuid)) for gpu in box.gpus]
    _torch_build(report, box)
    kind, reasons = determinism.classify(box.gpus)
    report.determinism = {"class": kind.name, "meaning": kind.meaning, "reasons": reasons}


def _gpu(
    report: Report, gpu: Gpu, environ: Mapping[str, str], usage: ProcessUsage, verdict: Verdict | None
) -> dict[str, Any]:
    """Its findings, and its row of the JSON form."""
    row, build = lookup(gpu.arch), wheels.lookup(gpu.arch)
    routed = faults.route(environ, gpu.arch)
    limits = faults.limits(gpu.arch, routed.environment)
    what = f"gpu {gpu.index}" if gpu.partition is None else f"gpu {gpu.index}/{gpu.partition}"
    how = precision(gpu.arch)
    why = "" if row is not None and row.bf16 else ", it has no bf16"
    attention = row.attention if row is not None else "math"
    memory = f", {gpu.memory_bytes / GIB:.0f} GiB" if gpu.memory_bytes else ""
    report.add("ok", what, f"{gpu.name} ({gpu.arch}{memory}): trains in {how}{why}, attention {attention}")
    for change in routed.changes:
        report.add("note", what, f"its trainers run with {change.words}" if change.ours else change.words)
    processes = [
        {"pid": pid, "bytes": held, "name": _name(pid)}
        for pid, held in sorted(usage.processes.items(), key=lambda item: -item[1])
    ]
    _in_use(report, what, gpu, usage, processes)
    _self_test(report, what, verdict)
    return {
        "index": gpu.index,
        "name": gpu.name,
        "arch": gpu.arch,
        "uuid": gpu.uuid,
        "bdf": gpu.bdf,
        "partition": gpu.partition,
        "memory_bytes": gpu.memory_bytes,
        "memory_used_bytes": usage.used_bytes,
        "processes": processes,
        "integrated": gpu.integrated,
        "visible": f"{gpu.visible_variable}={gpu.visible_value}",
        "bf16": row is not None and row.bf16,
        "precision": how,
        "fp8": row.fp8 if row is not None else "none",
        "matrix": row.matrix if row is not None else "none",
        "attention": attention,
        "known_faults": [
            {
                "key": fault.key,
                "kind": fault.kind,
                "what": fault.what,
                "route": fault.route,
                "sources": list(fault.sources),
            }
            for fault in faults.known(gpu.arch)
        ],
        "limits": asdict(limits),
        "environment": [asdict(change) for change in routed.changes],
        "torch": {"install": build.install(gpu.arch), "image": build.image, "note": build.note} if build else None,
        "self_test": None if verdict is None else verdict.model_dump(mode="json"),
    }


# --- use, now ------------------------------------------------------------------------------------------------


def _usage(
    report: Report, box: Box, sysfs: Path, environ: Mapping[str, str], seconds: float
) -> dict[str, ProcessUsage]:
    """By UUID; of the kernel's files for AMD where it can be, else of the drivers' programs."""
    result = {gpu.uuid: ProcessUsage() for gpu in box.gpus}
    unseen = []
    for gpu in (gpu for gpu in box.gpus if gpu.vendor == "amd"):
        used, processes = kfd.used_bytes(gpu, sysfs), kfd.processes(gpu, sysfs)
        result[gpu.uuid] = ProcessUsage(used, processes or {})
        if used is None and processes is None:
            unseen.append(gpu)
    if unseen:
        told, why = rocm.usage(environ, sysfs.parent, seconds)
        result |= {gpu.uuid: told[gpu.bdf] for gpu in unseen if gpu.bdf in told}
        if why is not None:
            report.add("note", "gpus", f"who uses the AMD GPUs is not known: {why}")
    if any(gpu.vendor == "nvidia" for gpu in box.gpus):
        told, why = nvidia.usage(environ, sysfs.parent, seconds)
        result |= {uuid: use for uuid, use in told.items() if uuid in result}
        if why is not None:
            report.add("note", "gpus", f"who uses the NVIDIA GPUs is not known: {why}")
    return result


def _in_use(report: Report, what: str, gpu: Gpu, usage: ProcessUsage, processes: list[dict[str, Any]]) -> None:
    used = usage.used_bytes or 0
    if not processes and (not gpu.memory_bytes or used <= FULL * gpu.memory_bytes):
        return
    who = ", ".join(f"{p['pid']} {p['name'] or '?'} {p['bytes'] / GIB:.1f} GiB" for p in processes[:8])
    more = f" and {len(processes) - 8} more" if len(processes) > 8 else ""
    amount = (
        f"{used / GIB:.1f} of {gpu.memory_bytes / GIB:.0f} GiB in use" if usage.used_bytes is not None else "in use"
    )
    by = f" by {who}{more}" if processes else " and no process is known to hold it (nvidia-smi or a reset may say more)"
    report.add("note", what, f"{amount}{by}")


def _name(pid: int) -> str:
    """Empty for a process that cannot be seen from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# --- the self-test -------------------------------------------------------------------------------------------


def _verdicts(settings: Settings) -> dict[str, Verdict]:
    """The newest of each slot of this node. OSError where their folder may not be read."""
    found: dict[str, Verdict] = {}
    for path in selftest.folder(Layout(settings.root).cache).glob("*.json"):
        verdict = selftest.read(path)
        if verdict is not None and verdict.node == settings.node:
            before = found.get(verdict.slot)
            if before is None or before.checked_at < verdict.checked_at:
                found[verdict.slot] = verdict
    return found


def _self_test(report: Report, what: str, verdict: Verdict | None) -> None:
    if verdict is None:
        report.add("note", what, "its self-test has not run yet; a worker runs it at its start")
        return
    when = f"self-test of {verdict.checked_at} ({verdict.runtime}, torch {verdict.torch})"
    if verdict.refused is not None:
        report.add("problem", what, f"{when}: {verdict.refused}")
    elif verdict.ok:
        uses = ", ".join(f"{part} {backend}" for part, backend in verdict.backends.items())
        report.add("ok", what, f"{when}: passed{f'; {uses}' if uses else ''}")
    else:
        report.add("note", what, f"{when}: {'; '.join(verdict.told) or 'some parts failed'}")


# --- torch ---------------------------------------------------------------------------------------------------


def _torch_build(report: Report, box: Box) -> None:
    """The commonest mistake on an AMD box: a torch for CUDA, which then trains on the CPU or not at all."""
    build = installed.torch_build()
    if build is None:
        return
    version = report.versions.get("torch", "?")
    report.add("ok", "torch", f"{version}, built for {build}")
    if version.partition("+")[0] != wheels.RELEASE:
        words = (
            f"eft is tested with torch {wheels.RELEASE}; with {version} jobs run as far as it has the same functions"
        )
        report.add("note", "torch", words)
    wanted = {"amd": "ROCm", "nvidia": "CUDA"}
    for vendor in sorted({gpu.vendor for gpu in box.gpus}):
        arch = next(gpu.arch for gpu in box.gpus if gpu.vendor == vendor)
        source = wheels.lookup(arch)
        command = source.install(arch) if source is not None else ""
        where = f"`{command}`" if command else "see https://pytorch.org/get-started/locally"
        if not build.startswith(wanted[vendor]):
            report.add(
                "problem",
                "torch",
                f"this box has {vendor.upper()} GPUs and torch is built for {build}: install its {wanted[vendor]} "
                f"build ({where}; `make demo TORCH=… TORCH_INDEX=…`)",
            )
    for arch in sorted({gpu.arch for gpu in box.gpus}):
        if (why := wheels.misfit(arch, build)) is not None:
            report.add("problem", "torch", why)
    if build.startswith("ROCm"):
        for package, why in software.rocm_conflicts().items():
            report.add("problem", "torch", f"{package} is installed beside a ROCm build of torch: {why}")
