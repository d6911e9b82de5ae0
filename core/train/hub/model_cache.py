"""The shared folder of prepared models: an entry is complete or not there at all.

Its layout is in core/spec/run/model_cache.py. An entry is built in PARTIAL and appears by one rename, after its
files are on the disk and its manifest is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from core.base.files import remembered_sha256, sync, write_json
from core.base.files import sha256 as file_sha256
from core.errors import ModelError
from core.spec.run.manifest import MANIFEST
from core.spec.run.model_cache import MODEL, PARTIAL, REFS

STALE_SECONDS = 7 * 86400
"""Work in progress that nobody has touched this long is thrown away."""
CHUNK = 1 << 20


class EntrySummary(Protocol):
    """What a manifest says of its files without loading them."""

    def as_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A complete model of the cache."""

    model_dir: Path
    source: dict[str, Any]
    summary: dict[str, Any]


class ModelCache:
    """One `models_dir`; any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        for name in (PARTIAL, ".locks", ".digests", REFS):
            (self.root / name).mkdir(exist_ok=True)

    def entry(self, key: str) -> CachedModel | None:
        """The entry if it is there with every file at its full size, else None."""
        folder = self.root / key
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            sizes = {file["path"]: file["bytes"] for file in manifest["files"]}
            if any((folder / MODEL / name).stat().st_size != size for name, size in sizes.items()):
                return None
            return CachedModel(folder / MODEL, manifest["source"], manifest["summary"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            print(f"notice: {folder / MANIFEST} is damaged ({error})", file=sys.stderr, flush=True)
            return None

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[Path]:
        """Be the only one to build `key`; gives its work folder, which may hold what an earlier try left.

        `on_wait` is called once when another process is at it. The lock dies with the process.
        """
        path = self.root / ".locks" / f"{_flat(key)}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.utime(path)
            work = self.root / PARTIAL / _flat(key)
            work.mkdir(exist_ok=True)
            os.utime(work)
            try:
                yield work
            except ModelError:
                shutil.rmtree(work)  # a model we refuse does not become better by being kept
                raise
        finally:
            os.close(fd)

    def commit(
        self,
        key: str,
        work: Path,
        source: dict[str, Any],
        summary: EntrySummary,
        hashes: Mapping[str, str] | None = None,
    ) -> CachedModel:
        """Turn `work/model`, a flat folder, into the entry; anything else in `work` is thrown away.

        `hashes`: SHA-256 of files that have just been read, by name; the others are read here.
        """
        known = hashes or {}
        for path in work.iterdir():
            if path.name != MODEL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        files = []
        for path in sorted((work / MODEL).iterdir()):
            digest = known.get(path.name) or file_sha256(path)
            files.append({"path": path.name, "bytes": path.stat().st_size, "sha256": digest})
            path.chmod(0o644)  # the mode of models_dir says who may read; writers differ in what they leave
            sync(path)
        sync(work / MODEL)
        manifest = {
            "version": 1,
            "key": key,
            "created": time.time(),
            "source": source,
            "summary": summary.as_dict(),
            "files": files,
        }
        write_json(work / MANIFEST, manifest)
        final = self.root / key
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # an entry that lost files: entry() said None, and we hold its lock
            print(f"notice: {final} was damaged and is replaced", file=sys.stderr, flush=True)
            damaged = self.root / PARTIAL / f"{_flat(key)}.damaged-{os.getpid()}"
            final.rename(damaged)
            shutil.rmtree(damaged)
        work.rename(final)
        sync(final.parent)
        return CachedModel(final / MODEL, source, summary.as_dict())

    def read_ref(self, name: str) -> dict[str, Any] | None:
        path = self._ref(name)
        return json.loads(path.read_bytes()) if path.exists() else None

    def write_ref(self, name: str, value: dict[str, Any]) -> None:
        write_json(self._ref(name), value)

    def _ref(self, name: str) -> Path:
        return self.root / REFS / f"{_short(quote(name, safe=''))}.json"

    def digest(self, path: Path) -> str:
        """SHA-256 of a file outside the cache, remembered as long as its size, mtime and inode stay."""
        return remembered_sha256(path, self.root / ".digests")

    def sweep(self) -> None:
        """Throw away work in progress that is old and that nobody holds."""
        for work in (self.root / PARTIAL).iterdir():
            if time.time() - _touched(work) < STALE_SECONDS:
                continue
            fd = os.open(self.root / ".locks" / f"{work.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if work.exists():
                    shutil.rmtree(work)
            except BlockingIOError:
                pass  # someone is at work on it
            finally:
                os.close(fd)


def _touched(work: Path) -> float:
    """When anything below `work` was last changed; now, if it vanishes meanwhile (it has just become an entry)."""
    try:
        return max(path.stat().st_mtime for path in (work, *work.rglob("*")))
    except FileNotFoundError:
        return time.time()


def _flat(key: str) -> str:
    return _short(key.replace("/", "--"))


def _short(name: str) -> str:
    """File names end at 255 bytes; a hub id with a long revision may not."""
    return name if len(name) <= 180 else f"{name[:140]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
