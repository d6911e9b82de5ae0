"""A model on its way to the registry: its files lie in a folder of their own until all are checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading

from api.errors import BadRequest
from api.files.upload import SPACE_CHECK_BYTES, checked_filename, disk_errors
from core.errors import TooLarge
from core.ids import new_id
from core.jobs.lifecycle.registry.uploads import ATTEMPT, KIND, StoredModel
from core.plan.models.uploaded import Uploaded, check_name, check_uploaded
from core.settings import Settings
from core.spec.run.chain import WeightFile
from core.storage.layout import Layout
from core.storage.store import Store

MOST_FILES = 1000
CHUNK = 1 << 20


class ModelUpload:
    """`begin` and `write` for each file, then `check`, then `finish`; `abort` in every other case. Keeps nothing of a
    refused model."""

    def __init__(self, layout: Layout, store: Store, settings: Settings, announced: int) -> None:
        """Raises NoSpace for what is announced, before a byte is read."""
        layout.require_space(settings.min_free_bytes, announced)
        self.id = new_id(KIND)
        self._layout, self._store, self._settings = layout, store, settings
        self._folder = layout.uploads / self.id
        self._folder.mkdir(mode=0o700)
        self._hashes: dict[str, str] = {}
        self._hash = hashlib.sha256()
        self._name: str | None = None
        self._descriptor = -1
        self._bytes = self._space_checked = self._whole = 0
        self._finished = False
        self._left = threading.Event()

    def begin(self, given: str | None) -> None:
        """The next file. Raises BadRequest for a name that is none, or comes twice; ModelError for a file that no model
        has."""
        self._end()
        name = checked_filename(given)
        check_name(name)
        if name in self._hashes:
            raise BadRequest(f"the file `{name}` comes twice", field="file")
        if len(self._hashes) >= MOST_FILES:
            raise TooLarge(f"a model has at most {MOST_FILES} files", field="file")
        path = self._folder / name
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._name, self._hash, self._bytes = name, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        """Raises TooLarge, NoSpace."""
        self._bytes += len(data)
        self._whole += len(data)
        if self._bytes > self._settings.max_upload_bytes:
            most = self._settings.max_upload_bytes
            words = (
                f"`{self._name}` is too large: a file has at most {most} bytes here; save the model in smaller shards"
            )
            raise TooLarge(f"{words}, or ask the administrator (EFT_MAX_UPLOAD_BYTES)", field="file")
        if self._whole - self._space_checked > SPACE_CHECK_BYTES:
            self._space_checked = self._whole
            self._layout.require_space(self._settings.min_free_bytes)
        self._hash.update(data)
        with disk_errors():
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def check(self) -> Uploaded:
        """What has come. Raises ModelError."""
        self._end()
        return check_uploaded(self._folder, self._left.is_set)

    def finish(self, found: Uploaded) -> StoredModel:
        """Put the files at their places on the data root. Raises NoSpace."""
        artifacts = self._layout.artifacts(self.id, ATTEMPT)
        self._finished = True
        files = []
        with disk_errors():
            (artifacts / found.kind).mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, sha256 in sorted(self._hashes.items()):
                part, path = self._folder / name, artifacts / found.kind / name
                size = part.stat().st_size
                incoming = self._store.incoming(str(path.relative_to(self._layout.root)), part)
                if self._settings.is_remote:
                    with part.open("rb") as stream:
                        while data := stream.read(CHUNK):
                            incoming.write(data)
                incoming.finish()
                files.append(WeightFile(path=f"{found.kind}/{name}", bytes=size, sha256=sha256))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._settings.is_remote:  # they lie in the bucket; a worker brings them where they are needed
            shutil.rmtree(self._layout.job(self.id), ignore_errors=True)
        return StoredModel(self.id, found, files)

    def leave(self) -> None:
        """End the check, from whatever thread: nobody waits for it any more."""
        self._left.set()

    def abort(self) -> None:
        """Leave nothing behind."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._finished:
            self._store.discard(str(self._layout.job(self.id).relative_to(self._layout.root)))

    @property
    def sent(self) -> dict[str, str]:
        """SHA-256 of each file."""
        return dict(self._hashes)

    def _end(self) -> None:
        """The current file has come to its end."""
        if self._name is None:
            return
        with disk_errors():
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._hashes[self._name] = self._hash.hexdigest()
        self._name = None
