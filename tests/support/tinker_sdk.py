"""The SDK of Tinker in an environment of its own, made once a machine from its lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from core import HOME as ROOT
from tests.support.environments import python_of
from tests.support.service import Service

LOCK = ROOT / "locks" / "tinker.txt"
OLDER = ROOT / "locks" / "tinker-versions.txt"


def python(version: str | None = None) -> Path:
    """The interpreter that has the SDK: the locked one, or an older one over the same libraries."""
    if version is None:
        return python_of("tinker", LOCK.read_text(), LOCK.read_text())
    requirement = older()[version]
    libraries = python().parent.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    return python_of("tinker", requirement, requirement + LOCK.read_text(), libraries)


def older() -> dict[str, str]:
    """Requirements of older SDKs by their versions."""
    lines = [line for line in OLDER.read_text().splitlines() if line.startswith("tinker==")]
    return {line.split()[0].partition("==")[2]: line for line in lines}


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
