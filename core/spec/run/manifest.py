"""The manifest that makes a folder complete: a model of the cache, a data set, a checkpoint, packed weights.

It is written last, and is the last to reach an object store, so that a folder with one has all of its files.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from core.spec.run.model_cache import MODEL

MANIFEST = "manifest.json"


class ManifestFile(NamedTuple):
    """A file that a manifest lists."""

    path: str
    """Path relative to the folder of the manifest."""
    bytes: int
    sha256: str


def listed_files(manifest: bytes) -> list[ManifestFile]:
    """The files of a checkpoint's manifest, or of one in the model cache, whose files lie below MODEL. Raises
    ValueError, KeyError or TypeError for anything else."""
    found: Any = json.loads(manifest)["files"]
    if isinstance(found, dict):
        files = [ManifestFile(str(name), int(about["bytes"]), str(about["sha256"])) for name, about in found.items()]
    else:
        files = [ManifestFile(f"{MODEL}/{one['path']}", int(one["bytes"]), str(one["sha256"])) for one in found]
    for file in files:
        if file.path.startswith("/") or ".." in PurePosixPath(file.path).parts:
            raise ValueError(f"{file.path!r} leads out of its folder")
    return files
