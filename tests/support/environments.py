"""Programs of other people in environments of their own, each made once a machine from its lock."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.models import HOME


def python_of(name: str, requirements: str, identity: str, libraries: Path | None = None) -> Path:
    """The interpreter of an environment with these pinned requirements, over the folder `libraries` where given.
    `identity`: a text that changes whenever the environment has to be made anew."""
    key = f"{identity}\n{libraries or ''}"  # those of another checkout may be gone tomorrow
    home = HOME / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done"
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)  # ours installs
            wanted = home / "requirements.txt"
            wanted.write_text(requirements)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(home / "bin" / "python"),
                "install",
                "-q",
                "--no-compile",
            ]
            subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(wanted)], check=True)
            if libraries is not None:
                (found,) = home.glob("lib/python*/site-packages")
                (found / "libraries.pth").write_text(f"{libraries}\n")
            done.touch()
    return home / "bin" / "python"
