"""Compiled code below the cache of the data root: `compiled/KEY`, an entry of core/caches.py, for the next attempt.

An entry is for one processor or GPU, one set of versions, one compiler, and one model with one method: it is as large
as a job's code, and goes when the room is needed. What lies there is run as code, so nobody else may write to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from core import caches
from core.spec.run.manifest import MANIFEST
from core.train.kernels.c_code.build import processor

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
VERSION = 1
"""Version of the layout of an entry. Raise it when that changes: old entries are never read."""


def compiler_here() -> str | None:
    """The C++ compiler that torch takes for code of a CPU, as it describes itself; None: there is none."""
    from torch._inductor import config

    found = shutil.which(config.cpp.cxx[-1])
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return next(iter(said.splitlines()), found)


def key(machine: Mapping[str, Any], model: Path, job: Mapping[str, Any]) -> str:
    """Hex digest of what decides the code: the machine, the model's shapes, and the job's fields in `job`."""
    about = {
        "version": VERSION,
        "machine": machine,
        "processor": processor(),
        "model": hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        "job": job,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@contextmanager
def compiled_code(cache_dir: Path | None, key: str) -> Iterator[tuple[str | None, bool]]:
    """Within, torch keeps compiled code in the entry of this key. Yields why it is not kept for the next attempt (None:
    it is), and whether there was an entry."""
    lease, folder, fault = None, None, None
    there = False
    if cache_dir is None:
        fault = "this run has no cache (`cache_dir` of its order)"
    else:
        entry = cache_dir / "compiled" / key
        there = (entry / MANIFEST).is_file()
        try:
            lease = _hold(entry)
            fault = None if lease is not None else f"{entry} was thrown away while it was opened"
        except OSError as error:
            fault = f"{entry} cannot be used ({error})"
        folder = entry if lease is not None else None
    aside = None if folder is not None else Path(tempfile.mkdtemp(prefix="eft-compiled-"))
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder or aside)
    try:
        yield fault, there and fault is None
    finally:
        torch._dynamo.reset()
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
        if lease is not None:
            lease.close()
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def _hold(entry: Path) -> caches.Lease | None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.mkdir(exist_ok=True, mode=0o700)
    about = entry.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise PermissionError("others may write to it, and what lies there is run as code")
    if not (entry / MANIFEST).is_file():
        (entry / MANIFEST).write_text(json.dumps({"version": VERSION}), encoding="utf-8")
    return caches.hold(entry / MANIFEST)
