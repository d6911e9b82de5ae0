"""A hash of the code that trains, for the run record and the lineage of models."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import core


@cache
def code_sha256() -> str:
    """SHA-256 over the paths and contents of all sources below `core/`."""
    root = Path(core.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c", ".jinja")):
        digest.update(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n".encode()
        )
    return digest.hexdigest()
