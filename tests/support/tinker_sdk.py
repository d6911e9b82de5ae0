"""The SDK of Tinker in an environment of its own, made once a machine from its lock."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from core import HOME as ROOT
from tests.support.models import HOME
from tests.support.service import Service

LOCK = ROOT / "locks" / "tinker.txt"
OLDER = ROOT / "locks" / "tinker-versions.txt"


def python(version: str | None = None) -> Path:
    """The interpreter that has the SDK: the locked one, or an older one over the same libraries."""
    if version is None:
        return _made(LOCK.read_text(), LOCK.read_text())
    requirement = older()[version]
    libraries = python().parent.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    return _made(requirement, requirement + LOCK.read_text(), libraries)


def older() -> dict[str, str]:
    """Requirements of older SDKs by their versions."""
    lines = [line for line in OLDER.read_text().splitlines() if line.startswith("tinker==")]
    return {line.split()[0].partition("==")[2]: line for line in lines}


def _made(requirements: str, identity: str, libraries: Path | None = None) -> Path:
    home = HOME / f"tinker-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done"
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run(
                [sys.executable, "-m", "venv", *(["--without-pip"] if libraries else []), str(home)], check=True
            )
            wanted = home / "requirements.txt"
            wanted.write_text(requirements)
            pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "-q"]
            subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(wanted)], check=True)
            if libraries is not None:
                (found,) = home.glob("lib/python*/site-packages")
                (found / "libraries.pth").write_text(f"{libraries}\n")
            done.touch()
    return home / "bin" / "python"


def environment(service: Service) -> dict[str, str]:
    """Environment of a program that uses the SDK against a service."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(service.folder),
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": str(service.note()["url"]),
        "TINKER_API_KEY": f"tml-{service.key}",
    }
