"""The archive of a project on this side: kept only when it is whole, and every file in it is what its manifest says."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eft.errors import DownloadError

MANIFEST = "MANIFEST.jsonl"


def save(blocks: Iterable[bytes], target: Path) -> list[str]:
    """Write an archive to `target`, whole or not at all. Returns what the server missed when it made it. Raises
    DownloadError for one that broke off or is damaged; OSError."""
    part = target.with_name(f".{target.name}.part")
    with part.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    missing = check(part)
    part.replace(target)
    return missing


def check(path: Path) -> list[str]:
    """Hold an archive against its manifest, a block at a time; what the server missed. Raises DownloadError."""
    sums: dict[str, str] = {}
    manifest: list[dict[str, Any]] = []
    try:
        with tarfile.open(path, "r|") as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                content = archive.extractfile(member)
                if content is None:
                    raise DownloadError(f"{path} holds {name!r}, which is not a plain file")
                if name == MANIFEST:
                    manifest = [json.loads(line) for line in content]
                else:
                    sums[name] = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DownloadError(f"{path} is damaged, or broke off: {error}; ask for it again") from error
    if not manifest or not manifest[-1].get("complete"):
        raise DownloadError(f"{path} broke off before its end; ask for it again")
    told = {line["path"]: line["sha256"] for line in manifest[:-1] if "sha256" in line}
    if wrong := sorted(name for name in sums.keys() | told.keys() if sums.get(name) != told.get(name)):
        raise DownloadError(f"{path} is damaged: {', '.join(wrong[:3])}; ask for it again")
    return [line["path"] for line in manifest[:-1] if "missing" in line]
