"""Files that last: their hash, that they are on the disk, and that they are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """SHA-256 of the file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """fsync a file, or a folder: what was renamed or made in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remembered_sha256(path: Path, notes: Path) -> str:
    """As `sha256`; kept in the folder `notes` as long as the file's size, mtime and inode stay."""
    stat = path.stat()
    signature = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = notes / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    if note.exists():
        known = json.loads(note.read_bytes())
        if known["signature"] == signature:
            return str(known["sha256"])
    digest = sha256(path)
    write_json(note, {"signature": signature, "sha256": digest})
    return digest


def write_private(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, for this user alone, and survives a power cut. OSError when the
    disk refuses."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write it as `write_private` does."""
    write_private(path, json.dumps(value, ensure_ascii=False, indent=1).encode())
