"""The self-test of one device, as the worker sees it: children, the journal they write, the verdict that is kept.

The device is touched by children alone (core/train/selftest). Each writes down which part it begins; when it dies or
hangs, that part has its verdict, and the rest is tried in a fresh child. What is known of the same device, versions and
code is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from core import HOME
from core.base.files import write_private
from core.hardware import installed, selftest
from core.hardware.device_mask import Gpu
from core.hardware.selftest import Part, Verdict
from core.hardware.tables import faults
from core.hardware.tables.arch import lookup
from worker import processes

log = logging.getLogger("eft.worker")

MAX_CRASHES = 6
"""Parts that may take their process with them before the device is given up."""
OPENING_SECONDS = 120.0
"""For a child to import torch and to open the device, whatever is given to one part: a busy box takes its time."""
LOOK_SECONDS = 0.05
KILL_SECONDS = 30.0
SOURCES = ("core/train/selftest", "core/train/kernels", "core/train/loss", "core/train/attention", "core/train/quant")
DRIVERS = ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/opt/rocm/.info/version")
OPENING = {"import": "it imported torch", "device": "it opened the device", "parts": "it loaded our kernels"}
PRODUCTS = ("matmul.", "lora.", "qlora.", "loss.logits.")
"""Parts that are the matrix library's work; on AMD a second library can do it."""


@dataclass(frozen=True, slots=True)
class SelfTestDevice:
    """What is tried, and in which environment: a trainer's own."""

    slot: str
    gpu: Gpu | None
    environment: Mapping[str, str] = field(repr=False)

    @property
    def arch(self) -> str:
        return "cpu" if self.gpu is None else self.gpu.arch

    @property
    def where(self) -> str:
        return "cpu" if self.gpu is None else "gpu"

    @property
    def name(self) -> str:
        return _processor() if self.gpu is None else self.gpu.name


# --- one device ------------------------------------------------------------------------------------------


def key_of(device: SelfTestDevice) -> str:
    """What a verdict holds for: this very card (or kind of processor), driver, torch and what it was built with, the
    libraries beside it, variables, and code of ours."""
    parts = [
        device.name,
        device.arch,
        "" if device.gpu is None else device.gpu.uuid,
        installed.torch_version_file() or "absent",
        *(f"{name}=={number}" for name, number in installed.libraries().items()),
        os.uname().release if device.gpu is not None else "",
        *(_text(Path(path)) for path in DRIVERS if device.gpu is not None),
        *(f"{name}={value}" for name, value in sorted(device.environment.items()) if _matters(name)),
        _sources(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def remembered(device: SelfTestDevice, node: str, cache: Path) -> Verdict | None:
    """The verdict of an earlier start that still holds."""
    key = key_of(device)
    found = selftest.read(_path(cache, node, key))
    if found is None or found.key != key or found.fault is not None:
        return None  # what kept a device from being tried may be mended by now
    return found


class Stopped(Exception):
    """The worker leaves before the self-test is done."""


def examine(
    device: SelfTestDevice, node: str, cache: Path, seconds: float, stopped: threading.Event | None = None
) -> Verdict:
    """Try every part, each at most `seconds` long, and remember the verdict. Never raises for what the device does;
    OSError when a child cannot be started or its journal cannot be written, Stopped when that is set."""
    began = time.monotonic()
    key = key_of(device)
    folder = selftest.folder(cache)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    trial = _Trial(device, folder / f".{_safe(node)}-{key}.journal", seconds, stopped or threading.Event())
    parts, fault = trial.run(dict(device.environment))
    environment: dict[str, str] = {}
    cured: dict[str, str] = {}
    if fault is None and (remedy := _remedy(device, parts)):
        again, second_fault = trial.run(dict(device.environment) | remedy)
        if second_fault is None and _bad(again) < _bad(parts):
            environment = remedy
            cured = {n: selftest.describe(parts[n]) for n in sorted(_bad(parts) - _bad(again))}
            parts = again
    verdict = selftest.finished(
        Verdict(
            key=key,
            slot=device.slot,
            node=node,
            device_name=device.name,
            arch=device.arch,
            torch=trial.about.get("torch", _torch()),
            runtime=_runtime(device, trial.about),
            checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - began, 2),
            parts=parts,
            environment=environment,
            cured=cured,
            fault=fault,
        )
    )
    try:
        _forget_older(folder, verdict)
        write_private(_path(cache, node, key), selftest.encoded(verdict))
    except OSError as error:  # it holds all the same
        log.warning(
            "the verdict on slot %s cannot be stored; the next start runs the self-test again: %s", device.slot, error
        )
    trial.journal.unlink(missing_ok=True)
    trial.output.unlink(missing_ok=True)
    return verdict


def _remedy(device: SelfTestDevice, parts: Mapping[str, Part]) -> dict[str, str]:
    """Variables that lead around a matrix library that faults, where there is another: ROCm's rocBLAS."""
    row = lookup(device.arch)
    amd = device.arch.startswith("gfx") if row is None else row.vendor == "amd"
    if not amd or not any(name.startswith(PRODUCTS) for name in _bad(parts)):
        return {}
    # What the operator has set stays; where it is ours already there is nothing left to try.
    return {name: value for name, value in faults.NO_HIPBLASLT.items() if name not in device.environment}


def _bad(parts: Mapping[str, Part]) -> set[str]:
    return {name for name, part in parts.items() if part.status in ("failed", "crashed", "hung")}


class _Trial:
    """The children of one device, and the journal they write."""

    def __init__(self, device: SelfTestDevice, journal: Path, seconds: float, stopped: threading.Event) -> None:
        self.device, self.journal, self.seconds, self.stopped = device, journal, seconds, stopped
        self.output = journal.with_suffix(".log")
        self.about: dict[str, str] = {}

    def run(self, environment: Mapping[str, str]) -> tuple[dict[str, Part], str | None]:
        """(parts, why they could not be tried)."""
        parts = self._before_the_machine_went_down()
        for _ in range(MAX_CRASHES):
            self._begin_journal()
            how = self._child(environment, without=parts)
            lines = _lines(self.journal)
            self.about |= next((line["device"] for line in lines if "device" in line), {})
            parts |= {line["end"]: Part.model_validate(line["part"]) for line in lines if "end" in line}
            if any("done" in line for line in lines):
                return parts, None
            if fault := next((line["fault"] for line in lines if "fault" in line), None):
                return parts, str(fault)
            doing = next((line["begin"] for line in reversed(lines) if "begin" in line), "import")
            if doing in OPENING or doing in parts:
                return parts, f"its process {how.words} while {OPENING.get(doing, 'it ended')}{self._last_words()}"
            parts[doing] = Part(status=how.status, error=f"{how.words}{self._last_words()}")
        crashed = [name for name, part in parts.items() if part.status in ("crashed", "hung")]
        return parts, f"{len(crashed)} parts took their process with them ({', '.join(crashed)})"

    def _child(self, environment: Mapping[str, str], without: Iterable[str]) -> _End:
        command = [sys.executable, "-m", "core.train.selftest", str(self.journal), "--device", self.device.where]
        command += ["--without", ",".join(without)]
        with self.output.open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=HOME, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
        size, last = 0, time.monotonic()
        try:
            while child.poll() is None:
                if self.stopped.wait(LOOK_SECONDS):
                    raise Stopped
                now = self.journal.stat().st_size
                if now != size:
                    size, last = now, time.monotonic()
                elif (silent := time.monotonic() - last) > self.seconds and (
                    silent > OPENING_SECONDS or self._opened()
                ):
                    return self._hung(child)
        finally:
            if child.returncode is None:
                processes.kill_session(child.pid)
        return _End("crashed", _ended(child.returncode))

    def _opened(self) -> bool:
        return any(line.get("begin", "import") not in OPENING for line in _lines(self.journal)[1:])

    def _hung(self, child: subprocess.Popen[bytes]) -> _End:
        processes.kill_session(child.pid)
        words = f"was killed after {self.seconds:g} s without a sign of life"
        try:
            child.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            words += ", and cannot be ended: it hangs inside the driver"
        return _End("hung", words)

    def _begin_journal(self) -> None:
        self.journal.write_text(json.dumps({"boot": _boot()}) + "\n", encoding="utf-8")

    def _before_the_machine_went_down(self) -> dict[str, Part]:
        """A card can take the whole machine with it: the part of an earlier boot that has no end is to blame, and what
        was done before it counts."""
        lines = _lines(self.journal)
        if not lines or lines[0].get("boot") in (None, _boot()):
            return {}
        parts = {line["end"]: Part.model_validate(line["part"]) for line in lines if "end" in line}
        doing = next((line["begin"] for line in reversed(lines) if "begin" in line), None)
        if doing is not None and doing not in OPENING and doing not in parts:
            parts[doing] = Part(status="crashed", error="the machine went down while it ran")
        return parts

    def _last_words(self) -> str:
        """The last line of what it wrote, where drivers say what has happened."""
        text = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return f": {text.splitlines()[-1][:200]}" if text else ""


@dataclass(frozen=True, slots=True)
class _End:
    status: selftest.Status
    words: str


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _lines(journal: Path) -> list[dict]:  # type: ignore[type-arg]
    """Whole lines; the last one may be torn."""
    try:
        raw = journal.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in raw:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by a crash of the machine
            break
    return found


# --- what a verdict holds for ----------------------------------------------------------------------------


def _matters(name: str) -> bool:
    known = {variable for fault in faults.FAULTS for variable in fault.set} | set(faults.ALLOCATOR_VARIABLES)
    # Inductor compiles no part of the self-test, and torch sets some of its variables itself.
    pattern = r"^(HSA|HIPBLASLT|ROCBLAS|TORCH(?!INDUCTOR_)|NVIDIA|PYTORCH|EFT_KERNELS)"
    return name in known or bool(re.match(pattern, name))


@cache
def _sources() -> str:
    digest = hashlib.sha256((HOME / "core/hardware/selftest.py").read_bytes())
    for folder in SOURCES:
        for path in sorted((HOME / folder).rglob("*")):
            if path.suffix in (".py", ".c"):
                digest.update(path.relative_to(HOME).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """A CPU's name with what it can: two of one name may differ in what a virtual machine lets through."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), os.uname().machine)
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{name} [{hashlib.sha256(flags.encode()).hexdigest()[:8]}]"


def _runtime(device: SelfTestDevice, about: Mapping[str, str]) -> str:
    drivers = [found for path in DRIVERS[:2] if (found := _text(Path(path)).strip())]
    driver = f" (driver {drivers[0]})" if device.gpu is not None and drivers else ""
    return about.get("runtime", device.arch) + driver


def _boot() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _safe(node: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", node)


def _path(cache: Path, node: str, key: str) -> Path:
    return selftest.folder(cache) / f"{_safe(node)}-{key}.json"


def _forget_older(folder: Path, verdict: Verdict) -> None:
    """Keep one verdict a device: those of other versions are no longer needed."""
    for path in folder.glob(f"{_safe(verdict.node)}-*.json"):
        old = selftest.read(path)
        if old is None or (old.slot == verdict.slot and old.key != verdict.key):
            path.unlink(missing_ok=True)


def untried(device: SelfTestDevice, node: str, fault: str) -> Verdict:
    """The verdict on a device that could not be tried."""
    return selftest.finished(
        Verdict(
            key="", slot=device.slot, node=node, device_name=device.name, arch=device.arch, torch=_torch(),
            runtime=device.arch, checked_at=datetime.now(UTC).isoformat(timespec="seconds"), seconds=0.0, parts={},
            fault=fault,
        )
    )  # fmt: skip
