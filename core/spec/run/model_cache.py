"""Layout of the shared folder of prepared models and data sets. An entry is complete or not there at all.

models/hub/<owner>--<name>/<commit>/               model/ + manifest.json
models/gguf/<sha256>-c<converter>/                 model/ + manifest.json
models/unpacked/<sha256>-v<version>/               model/ + manifest.json, from a quantised model
models/merged/<sha256>/                            model/ + manifest.json, with the adapters of other jobs
models/tokenizer/<owner>--<name>/<commit>/         model/ + manifest.json, without weights
models/hub-data/<owner>--<name>/<commit>-<files>/  model/ + manifest.json
models/tasks/<task>/<sha256>/                      model/ + manifest.json: rows of a generated task
models/refs/…                                      which commit a branch or tag last meant, for work without a network
models/.partial/ .locks/ .digests/                 work in progress, one lock a key, SHA-256 of local files
"""

from __future__ import annotations

from pathlib import PurePosixPath

MODELS = "models"
MODEL = "model"
"""Folder of the files in an entry."""
REFS = "refs"
PARTIAL = ".partial"
GGUF = "gguf"
"""Folder of the entries that were converted from GGUF files."""


def hub_key(repo: str, commit: str) -> str:
    """Entry of a model of the hub at a commit."""
    return f"hub/{repo.replace('/', '--')}/{commit}"


def tokenizer_key(repo: str, commit: str) -> str:
    """Entry of a model's tokenizer and configuration at a commit, without its weights."""
    return f"tokenizer/{repo.replace('/', '--')}/{commit}"


def dataset_key(repo: str, commit: str, files: str) -> str:
    """Entry of chosen files of a hub data set; `files` identifies the choice."""
    return f"hub-data/{repo.replace('/', '--')}/{commit}-{files}"


def task_key(name: str, sha256: str) -> str:
    """Entry of the rows of a task or game; `sha256` says what they are made of."""
    return f"tasks/{name}/{sha256}"


def gguf_key(sha256: str, converter: int) -> str:
    """Entry of a converted GGUF file; `converter` is the converter's version."""
    return f"{GGUF}/{sha256}-c{converter}"


def unpacked_key(sha256: str, version: int) -> str:
    """Entry of a quantised model in 16 bits; `sha256` identifies its files, `version` is the reader's."""
    return f"unpacked/{sha256}-v{version}"


def merged_key(sha256: str) -> str:
    """Entry of a model into which adapters were merged; `sha256` says what it is made of."""
    return f"merged/{sha256}"


def is_gguf_key(key: str, sha256: str) -> bool:
    """Whether an entry was converted from this file, by whichever version."""
    return key.startswith(f"{GGUF}/{sha256}-")


def entry_of(path: str) -> str | None:
    """Key of the entry, from the data root, in which a path relative to the data root lies. None for other paths."""
    parts = PurePosixPath(path).parts
    if not parts or parts[0] != MODELS or MODEL not in parts:
        return None
    return str(PurePosixPath(*parts[: parts.index(MODEL)]))
