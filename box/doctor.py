"""`eft doctor`: what this box has, what is wrong with it, and what to do about it.

For people, or as one JSON object with --json. Exit status 0: jobs can run here; 1: something stops them. Nothing is
changed and nothing is started; the card itself is not touched, since nobody here imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from box import software
from core import __version__, health
from core.db.engine import Database
from core.hardware import faults
from core.hardware.arch import lookup
from core.hardware.discover import Box, Gpu, HardwareError, discover
from core.settings import Settings

Level = Literal["ok", "note", "problem"]
MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    what: str
    detail: str


@dataclass(slots=True)
class Report:
    """Everything the doctor says; `as_dict` is the JSON form."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    determinism: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def add(self, level: Level, what: str, detail: str) -> None:
        self.findings.append(Finding(level, what, detail))

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def examine(environ: Mapping[str, str] = os.environ) -> Report:
    """Look at everything. Whatever goes wrong in one part is a finding, and the others are looked at all the same."""
    report = Report()
    settings = _settings(report)
    parts: list[tuple[str, Callable[[], None]]] = [("software", lambda: _software(report))]
    if settings is not None:
        parts += [
            ("gpus", lambda: _gpus(report, settings, environ)),
            ("data", lambda: _data(report, settings)),
            ("database", lambda: _database(report, settings)),
            ("broker", lambda: _broker(report, settings)),
        ]
    for what, look in parts:
        try:
            look()
        except Exception as error:  # a doctor that falls ill is of no use: the fault itself is what to tell
            report.add("problem", what, f"could not be examined: {type(error).__name__}: {error}")
    return report


def _settings(report: Report) -> Settings | None:
    try:
        return Settings()
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(["EFT", *(str(part).upper() for part in fault["loc"])]) if fault["loc"] else "EFT_…"
            report.add("problem", "settings", f"{name}: {fault['msg']} (docs/settings.md has them all)")
        return None


def _software(report: Report) -> None:
    report.versions = {"eft": __version__, **software.versions(), **software.drivers()}
    missing = [name for name in software.NEEDED if report.versions[name] == "absent"]
    if missing:
        report.add(
            "problem", "software", f"not installed: {', '.join(missing)}; a worker needs them (`make demo` installs)"
        )


# --- GPUs ------------------------------------------------------------------------------------------------


def _gpus(report: Report, settings: Settings, environ: Mapping[str, str]) -> None:
    try:
        box = discover(settings.sysfs, environ, None if settings.gpus is None else list(settings.gpus))
    except HardwareError as error:
        report.add("problem", "gpus", error.message)
        return
    for note in box.notes:
        report.add("note", "gpus", note)
    if not box.gpus:
        report.add(
            "ok",
            "gpus",
            f"none: jobs train on the CPU ({len(os.sched_getaffinity(0))} cores), {settings.cpu_slots} at a time",
        )
    report.gpus = [_row(gpu, environ, report) for gpu in box.gpus]
    _torch_build(report, box)
    report.determinism = _determinism(box)


def _row(gpu: Gpu, environ: Mapping[str, str], report: Report) -> dict[str, Any]:
    row = lookup(gpu.arch)
    changes = faults.route(environ, gpu.arch).changes
    memory = f", {gpu.memory_bytes / (1 << 30):.0f} GiB" if gpu.memory_bytes else ""
    precision = "bf16" if row is not None and row.bf16 else "fp32, it has no bf16"
    report.add("ok", f"gpu {gpu.index}", f"{gpu.name} ({gpu.arch}{memory}): trains in {precision}")
    for change in changes:
        words = f"its trainers run with {change.words}" if change.ours else change.words
        report.add("note", f"gpu {gpu.index}", words)
    return {
        "index": gpu.index,
        "name": gpu.name,
        "arch": gpu.arch,
        "uuid": gpu.uuid,
        "bdf": gpu.bdf,
        "memory_bytes": gpu.memory_bytes,
        "integrated": gpu.integrated,
        "bf16": row is not None and row.bf16,
        "fp8": row.fp8 if row is not None else "none",
        "matrix": row.matrix if row is not None else "none",
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
        "environment": [asdict(change) for change in changes],
    }


def _torch_build(report: Report, box: Box) -> None:
    """The commonest mistake on an AMD box: a torch for CUDA, which then trains on the CPU or not at all."""
    build = software.torch_build()
    if build is None:
        return
    report.add("ok", "torch", f"{report.versions.get('torch', '?')}, built for {build}")
    wanted = {"amd": "ROCm", "nvidia": "CUDA"}
    for vendor in sorted({gpu.vendor for gpu in box.gpus}):
        if not build.startswith(wanted[vendor]):
            report.add(
                "problem",
                "torch",
                f"this box has {vendor.upper()} GPUs and torch is built for {build}: install its {wanted[vendor]} "
                "build (`make demo TORCH=… TORCH_INDEX=…`; https://pytorch.org/get-started/locally)",
            )


def _determinism(box: Box) -> dict[str, Any]:
    """One class for the box: what two runs of one job may differ in."""
    if not box.gpus:
        return {
            "class": "exact",
            "reasons": [
                "on a CPU a run is equal to the bit, stopped and gone on or not, with the same versions and threads"
            ],
        }
    reasons = ["torch's deterministic algorithms are on, but an operation without one only warns"]
    if any(gpu.vendor == "amd" for gpu in box.gpus):
        reasons.append("ROCm's libraries choose kernels by version and card: a run may differ after an update")
    if len({gpu.arch for gpu in box.gpus}) > 1:
        reasons.append("the cards differ: a job that goes on elsewhere may land on another architecture")
    return {"class": "best effort", "reasons": reasons}


# --- what the service stands on --------------------------------------------------------------------------


def _data(report: Report, settings: Settings) -> None:
    root = settings.root
    if not root.exists():
        parent = next(folder for folder in root.parents if folder.exists())
        if parent.is_dir() and os.access(parent, os.W_OK):
            report.add("ok", "data", f"{root} is not there yet; `eft up` makes it")
        else:
            report.add("problem", "data", f"{root} is not there, and nothing can be made in {parent} (EFT_DATA)")
        return
    if not root.is_dir():
        report.add("problem", "data", f"{root} is no folder (EFT_DATA)")
        return
    check = health.data(root, settings.min_free_bytes)
    report.add("ok" if check.ok else "problem", "data", f"{root}: {check.detail}")
    mode = root.stat().st_mode & 0o777
    if mode & 0o007:
        report.add("note", "data", f"{root} is open to everybody on this box (mode {mode:o}); chmod 700 it")


def _database(report: Report, settings: Settings) -> None:
    try:
        url = make_url(settings.sqlalchemy_url)
    except ArgumentError:
        report.add(
            "problem",
            "database",
            "EFT_DATABASE_URL is no SQLAlchemy URL, such as postgresql+psycopg://user:…@host/name",
        )
        return
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        report.add("ok", "database", f"{shown} is not there yet; `eft up` makes it")
        return
    database = Database(settings.sqlalchemy_url)
    try:
        checks = health.database(database)
    finally:
        database.dispose()
    for what, check in checks.items():
        report.add(
            "ok" if check.ok else "problem", what, f"{shown}: {check.detail}" if what == "database" else check.detail
        )


def _broker(report: Report, settings: Settings) -> None:
    if not settings.broker_url and not settings.broker_socket.exists():
        report.add("ok", "broker", "the embedded one; it is not running, `eft up` starts it")
        return
    check = health.broker(settings.celery_broker_url)
    where = "at EFT_BROKER_URL" if settings.broker_url else "the embedded one"
    if check.ok or settings.broker_url:
        report.add("ok" if check.ok else "problem", "broker", f"{where}: {check.detail}")
    else:
        report.add("note", "broker", f"{where}: {check.detail}; `eft up` starts it")


# --- the two forms ---------------------------------------------------------------------------------------


def for_people(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [versions, ""]
    width = max((len(finding.what) for finding in report.findings), default=0)
    lines += [f"{MARKS[finding.level]:<8}{finding.what:<{width}}  {finding.detail}" for finding in report.findings]
    if report.determinism:
        lines += ["", f"determinism: {report.determinism['class']} ({'; '.join(report.determinism['reasons'])})"]
    problems = sum(finding.level == "problem" for finding in report.findings)
    lines += ["", "jobs can run here" if report.ok else f"{problems} problem{'s' * (problems > 1)} to mend first"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="eft doctor", description="What this box has and what is wrong with it.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args()
    report = examine()
    print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) if given.json else for_people(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
