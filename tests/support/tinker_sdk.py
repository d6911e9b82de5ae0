"""The SDK of Tinker in an environment of its own, made once a machine from its lock."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from core import HOME as ROOT
from tests.support.models import HOME

LOCK = ROOT / "locks" / "tinker.txt"


def python() -> Path:
    """The interpreter that has the SDK."""
    home = HOME / f"tinker-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done"
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
            subprocess.run([*pip, "-r", str(LOCK)], check=True)
            done.touch()
    return home / "bin" / "python"
