"""Making a recording of this machine (`eft doctor --record FILE`) that may be sent to strangers.

It has what discovery reads and nothing else: the kernel's list of GPUs, the mode and group of the device files, what
the drivers' programs answered, and variables that concern GPUs. Serial numbers and UUIDs are replaced by hashes, the
same one everywhere, so that sources still agree with one another; the salt is drawn each time and thrown away.
The host's name becomes `host`, values with a path `<path>`. No process, user or job is in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from core.hardware.recording import DeviceFile, Recording
from core.hardware.sources import nvidia, pci, rocm, tools
from core.hardware.sources.kfd import NODES, SENSORS

PCI = f"sys/{pci.DEVICES}/*/uevent"
"""PCI devices that compute or display; other devices are not recorded."""
FILES = (
    PCI.removeprefix("sys/"),
    f"{NODES}/*/gpu_id",
    f"{NODES}/*/properties",
    f"{NODES}/*/mem_banks/*/properties",
    "class/drm/renderD*/device/mem_info_vram_total",
    "class/drm/renderD*/device/mem_info_vram_used",
    "class/drm/renderD*/device/mem_info_gtt_total",
    "class/drm/renderD*/device/gpu_busy_percent",
    *(f"class/drm/renderD*/device/hwmon/hwmon*/{name}" for name in ("temp*_label", *SENSORS)),
    "class/drm/renderD*/device/product_name",
    "class/drm/renderD*/device/current_compute_partition",
    "class/drm/renderD*/device/current_memory_partition",
    "module/amdgpu/version",
)
"""Below /sys."""
MORE_FILES = ("opt/rocm/.info/version", "proc/driver/nvidia/version", ".dockerenv", "run/.containerenv")
EMPTY = (".dockerenv", "run/.containerenv")
"""That they are there says enough."""
DEVICES = ("kfd", "dri/renderD*")
PROGRAMS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("amd-smi", (rocm.LIST, rocm.STATIC, rocm.LIVE)),
    ("rocm-smi", (rocm.SHOW,)),
    ("nvidia-smi", (nvidia.QUERY, nvidia.MIG_QUERY, nvidia.LIST, nvidia.LIVE_QUERY)),
)
VARIABLE = re.compile(
    r"^((HIP|ROCR|CUDA|NVIDIA|AMD)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(HSA|MIOPEN|HIPBLASLT|ROCBLAS|TORCH_BLAS)_\w+"
    r"|TORCH_ROCM_\w+|DISABLE_ADDMM_CUDA_LT|PYTORCH_(HIP_|CUDA_)?ALLOC_CONF|KUBERNETES_SERVICE_HOST|container)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
PRESENCE = ("KUBERNETES_SERVICE_HOST", "container")
UNIQUE_ID = re.compile(r"^(unique_id|hive_id) (\d+)$", re.MULTILINE)
UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
LONG_HEX = re.compile(r"(?<![0-9a-zA-Z])(0[xX])?([0-9a-fA-F]{16})(?![0-9a-zA-Z])")
SERIAL = re.compile(r'("[^"\n]*(?:serial|fru_id)[^"\n]*"\s*:\s*")([^"\n]+)(")', re.IGNORECASE)


def record(
    environ: Mapping[str, str], sysfs: Path, machine: str, source: str, seconds: float = tools.SECONDS
) -> Recording:
    """This machine, made anonymous."""
    root = sysfs.parent
    hide = Anonymiser()
    recording = Recording(machine, source)
    for name, value in sorted(environ.items()):
        if VARIABLE.match(name) and not SECRET.search(name):
            shown = "1" if name in PRESENCE else "<path>" if "/" in value or "\n" in value else hide(value)
            recording.environment[name] = shown
    for pattern, below in [(f"sys/{pattern}", sysfs) for pattern in FILES] + [(name, root) for name in MORE_FILES]:
        inner = pattern.removeprefix("sys/") if below is sysfs else pattern
        for path in _sorted(below.glob(inner)):
            name = f"sys/{path.relative_to(sysfs)}" if below is sysfs else str(path.relative_to(root))
            try:
                content = "" if name in EMPTY else path.read_text(errors="replace")
            except OSError:
                recording.unreadable.append(name)
                continue
            if pattern != PCI or pci.parse(content) is not None:
                recording.files[name] = _ended(hide(content))
    if names := pci.names(sysfs):
        recording.files[pci.NAMES[0]] = _ended(names)
    for pattern in DEVICES:
        for path in _sorted((root / "dev").glob(pattern)):
            found = path.stat()
            usable = os.access(path, os.R_OK | os.W_OK, effective_ids=True)
            recording.devices[str(path.relative_to(root))] = DeviceFile(
                stat.S_IMODE(found.st_mode), found.st_gid, usable
            )
    for program, commands in PROGRAMS:
        found_at = tools.find(program, environ, root)
        for arguments in commands if found_at is not None else ():
            assert found_at is not None
            answer = tools.ask(found_at, arguments, environ, seconds)
            recording.tools[(program, *arguments)] = (answer.status, _ended(hide(answer.output)))
    return recording


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """By the numbers in them."""
    return sorted(
        paths, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
    )


def _ended(content: str) -> str:
    return content if not content or content.endswith("\n") else content + "\n"


class Anonymiser:
    """Replaces what identifies a machine in a text, the same thing by the same thing everywhere.

    AMD writes one serial number in decimal (the kernel), as 16 hexadecimal digits (rocm-smi, HIP) and inside a UUID
    (amd-smi); NVIDIA writes UUIDs.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)
        self._host = _host_names()

    def __call__(self, content: str) -> str:
        content = UNIQUE_ID.sub(lambda match: f"{match[1]} {self._number(int(match[2]))}", content)
        content = UUID.sub(lambda match: self._uuid(match[0]), content)
        content = LONG_HEX.sub(lambda match: (match[1] or "") + self._hex(match[2]), content)
        content = SERIAL.sub(lambda match: match[1] + self._serial(match[2]) + match[3], content)
        return self._host.sub("host", content) if self._host is not None else content

    def _digest(self, what: str) -> str:
        return hashlib.blake2b(what.lower().encode(), key=self._salt, digest_size=16).hexdigest()

    def _number(self, serial: int) -> int:
        """0 says `none` and stays."""
        return int(self._hex(f"{serial:016x}"), 16)

    def _hex(self, digits: str) -> str:
        """16 digits in the same case. Zero says `none` and stays."""
        if not digits.strip("0"):
            return digits
        hashed = "e" + self._digest(f"{int(digits, 16):016x}")[:15]
        return hashed.upper() if digits.upper() == digits and digits.lower() != digits else hashed

    def _uuid(self, uuid: str) -> str:
        d = self._digest(uuid)
        return f"{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:32]}"

    def _serial(self, value: str) -> str:
        """Mask a serial number of a form that no rule above knows."""
        known = value in ("N/A", "0x0") or LONG_HEX.fullmatch(value) or UUID.fullmatch(value)
        return value if known else self._digest(value)[:12]


def _host_names() -> re.Pattern[str] | None:
    """None where the name is that of everybody's machine, or so short that it would be found everywhere."""
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    worth = sorted((name for name in names if len(name) >= 3 and name != "localhost"), key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, worth))})\b", re.IGNORECASE) if worth else None
