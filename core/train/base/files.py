"""What everything that writes files to last needs: their hash, that they are on the disk, and whole or not there."""

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
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
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


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Appear whole or not at all."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
