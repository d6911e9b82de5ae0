"""The tiny model of tests/support/tiny_model.py, made once a machine: making it costs the import of torch."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from tests.support.service import ROOT

HOME = Path(tempfile.gettempdir()) / f"eft-tests-{os.getuid()}"


def folder() -> Path:
    """With the model in it as `tiny`, for EFT_MODEL_ROOTS. It is everybody's: nothing is written there."""
    made_by = Path(__file__).with_name("tiny_model.py").read_bytes()
    made_by += "".join(version(name) for name in ("torch", "transformers", "tokenizers")).encode()
    found = HOME / f"models-{sha256(made_by).hexdigest()[:12]}"
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=HOME) as making:
                command = [sys.executable, "-m", "tests.support.tiny_model", f"{making}/models/tiny"]
                subprocess.run(command, cwd=ROOT, check=True)
                os.replace(f"{making}/models", found)
    return found
