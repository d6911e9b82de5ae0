"""The data root as a bucket of an S3-compatible object store (the extra `s3`: boto3).

An object appears when it is complete: S3 promises that of every PUT and of the end of a multipart upload, and that
every later read sees it (https://docs.aws.amazon.com/AmazonS3/latest/userguide/Welcome.html#ConsistencyModel).
Folders of several objects get theirs last that makes them whole, `manifest.json`, and lose it first. Every part goes up
with its MD5, which the store holds it against; what comes down is held against the SHA-256 that a manifest or the
database has of it (worker/staging.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from core.settings import Settings
from core.spec.run.manifest import MANIFEST
from core.storage.store import Incoming, ObjectChanged, ObjectReader, Store, StoreAway, StoredObject

PART = 16 << 20
"""Bytes of one part of a large object, at least; S3 takes 10 000 of them, each of 5 MiB or more."""
MOST_PARTS = 9_000
AT_ONCE = 4
"""Parts, or objects, that are on their way side by side."""
LOG = "log"
LOG_PART = 1 << 20
"""A log that grows is stored in objects of so many bytes; only the last of them is written again."""
GONE = ("404", "NoSuchKey", "NotFound")
T = TypeVar("T")
A = TypeVar("A")


class Bucket(Store):
    """`s3://bucket/prefix`."""

    def __init__(self, settings: Settings) -> None:
        """Make no request yet. Raises StoreAway where boto3 is not installed."""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise StoreAway(
                f"EFT_DATA={settings.data} is an object store, and boto3 is not installed here: "
                "python -m pip install --require-hashes -r locks/s3.txt"
            ) from error
        self.where = settings.data
        self._bucket, _, prefix = settings.data.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if settings.s3_endpoint else "auto"},
            retries={"mode": "standard", "max_attempts": 4},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=4 * AT_ONCE,
            # Stores other than AWS's do not all know the newer checksums; MD5 is known to every one.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._s3: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=settings.s3_endpoint or None,
            region_name=settings.s3_region or "us-east-1",
            aws_access_key_id=settings.s3_access_key_id or None,
            aws_secret_access_key=settings.s3_secret_access_key or None,
            config=config,
        )

    # -- small objects

    def read(self, key: str) -> bytes:
        with self._words(key):
            return bytes(self._ask("get_object", key)["Body"].read())

    def create(self, key: str, content: bytes) -> bool:
        try:
            with self._words(key, passing=("PreconditionFailed", "412", "ConditionalRequestConflict", "409")):
                self._ask("put_object", key, Body=content, ContentMD5=_md5(content), IfNoneMatch="*")
        except _Passed:
            return False
        return True

    def write(self, key: str, content: bytes) -> None:
        with self._words(key):
            self._ask("put_object", key, Body=content, ContentMD5=_md5(content))

    def delete(self, key: str) -> None:
        with self._words(key):
            self._ask("delete_object", key)

    def size(self, key: str) -> int | None:
        try:
            with self._words(key):
                return int(self._ask("head_object", key)["ContentLength"])
        except FileNotFoundError:
            return None

    # -- large ones

    def open(self, key: str, *, size: int | None, start: int, length: int) -> ObjectReader:
        if size is not None and (found := self.size(key)) != size:
            if found is None:
                raise FileNotFoundError(key)
            raise ObjectChanged(f"{key} is not what was stored: its size has changed")
        if length <= 0:
            return _Nothing()
        try:
            with self._words(key, passing=("InvalidRange", "416")):
                body = self._ask("get_object", key, Range=f"bytes={start}-{start + length - 1}")["Body"]
        except _Passed as error:
            raise ObjectChanged(f"{key} is not what was stored: it is shorter") from error
        return _Body(self, key, body)

    def incoming(self, key: str, part: Path) -> Incoming:
        return _Parts(self, key, part)

    def put_file(self, key: str, path: Path) -> None:
        """A local file, in parts where it is large. The key does not exist before all of it is stored."""
        size = path.stat().st_size
        if size <= PART:
            self.write(key, path.read_bytes())
            return
        step = max(PART, -(-size // MOST_PARTS))
        upload = self.begin(key)
        try:
            with path.open("rb") as file:
                descriptor = file.fileno()

                def send(number: int) -> dict[str, Any]:
                    return self.send(key, upload, number + 1, os.pread(descriptor, step, number * step))

                parts = _side_by_side(send, range(-(-size // step)))
            self.complete(key, upload, parts)
        except BaseException:
            self.abandon(key, upload)
            raise

    def get_file(self, key: str, path: Path, size: int) -> str:
        """Into a new local file, which is on the disk then; its SHA-256. Raises FileNotFoundError, ObjectChanged."""
        step = 4 * PART
        with path.open("xb") as file:
            os.truncate(file.fileno(), size)

            def fetch(start: int) -> None:
                source = self.open(key, size=None, start=start, length=min(step, size - start))
                try:
                    at = start
                    while data := source.read(1 << 20):
                        os.pwrite(file.fileno(), data, at)
                        at += len(data)
                finally:
                    source.close()
                if at != min(start + step, size):
                    raise ObjectChanged(f"{key} does not have the expected size")

            _side_by_side(fetch, range(0, size, step))
            os.fsync(file.fileno())
        with path.open("rb") as written:
            return hashlib.file_digest(written, "sha256").hexdigest()

    # -- many

    def tree(self, prefix: str) -> Iterator[StoredObject]:
        whole = self._prefix + (f"{prefix}/" if prefix else "")
        token: dict[str, str] = {}
        while True:
            with self._words(prefix):
                page = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=whole, **token)
            for one in page.get("Contents", ()):
                yield StoredObject(
                    one["Key"].removeprefix(self._prefix), int(one["Size"]), one["LastModified"].timestamp()
                )
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def discard(self, prefix: str) -> None:
        keys = [entry.key for entry in self.tree(prefix)]
        for key in keys:
            if key.endswith(f"/{MANIFEST}"):  # first, so that no reader takes half of the rest for a whole
                self.delete(key)
        _side_by_side(self.delete, [prefix, *(key for key in keys if not key.endswith(f"/{MANIFEST}"))])

    def sweep(self, older_than: float) -> int:
        """Abort multipart uploads whose process has ended before they did; their parts take space and are invisible.
        Returns how many."""
        with self._words(""):
            found = self._s3.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix).get("Uploads", ())
        stale = [one for one in found if time.time() - one["Initiated"].timestamp() > older_than]
        for one in stale:
            self.abandon(one["Key"].removeprefix(self._prefix), one["UploadId"])
        return len(stale)

    # -- a multipart upload

    def begin(self, key: str) -> str:
        with self._words(key):
            return str(self._ask("create_multipart_upload", key)["UploadId"])

    def send(self, key: str, upload: str, number: int, data: bytes) -> dict[str, Any]:
        with self._words(key):
            done = self._ask("upload_part", key, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_md5(data))
        return {"ETag": done["ETag"], "PartNumber": number}

    def complete(self, key: str, upload: str, parts: Sequence[dict[str, Any]]) -> None:
        with self._words(key):
            self._ask("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": list(parts)})

    def abandon(self, key: str, upload: str) -> None:
        """Never raises: what stays is swept later, and there is an error on its way already."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._ask("abort_multipart_upload", key, UploadId=upload)
        except (BotoCoreError, ClientError):
            return

    # -- asking

    def _ask(self, what: str, key: str, **about: Any) -> Any:
        return getattr(self._s3, what)(Bucket=self._bucket, Key=self._prefix + key, **about)

    @contextmanager
    def _words(self, key: str, passing: tuple[str, ...] = ()) -> Iterator[None]:
        """Errors of boto3 as ours. `passing`: codes that the caller waits for (_Passed)."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in passing:
                raise _Passed from error
            if code in GONE:
                raise FileNotFoundError(f"{self.where}: there is no `{key}`") from error
            raise StoreAway(f"{self.where} {_refusal(code, error)}") from error
        except (BotoCoreError, HTTPClientError, OSError) as error:
            words = f"cannot be reached ({type(error).__name__}: {error}); see EFT_S3_ENDPOINT"
            raise StoreAway(f"{self.where} {words}") from error


def _refusal(code: str, error: Exception) -> str:
    match code:
        case "NoSuchBucket":
            return "does not exist: create the bucket first, eft creates none (EFT_DATA)"
        case "AccessDenied" | "403" | "AllAccessDisabled":
            return "refuses this key: it needs s3:GetObject, PutObject, DeleteObject and ListBucket there"
        case "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken" | "ExpiredToken":
            return f"does not accept the key ({code}); see EFT_S3_ACCESS_KEY_ID and EFT_S3_SECRET_ACCESS_KEY"
        case "RequestTimeTooSkewed":
            return "refuses requests because this box's clock is wrong by more than 15 minutes: set it (NTP)"
        case "QuotaExceeded" | "XMinioStorageFull" | "InsufficientStorage" | "507":
            return f"is full ({code})"
        case _:
            return f"refused ({error})"


def log_key(run: str, start: int) -> str:
    """Where the bytes of a run's log from `start` on lie; `start` is a multiple of LOG_PART."""
    return f"{run}/{LOG}/{start:016d}"


class _Passed(Exception):
    """The store said what the caller had thought of."""


class _GivenUp(Exception):
    """After an error beside it."""


class _Nothing(ObjectReader):
    def read(self, size: int) -> bytes:
        return b""

    def close(self) -> None:
        return None


class _Body(ObjectReader):
    def __init__(self, bucket: Bucket, key: str, body: Any) -> None:
        self._bucket, self._key, self._body = bucket, key, body

    def read(self, size: int) -> bytes:
        with self._bucket._words(self._key):
            return bytes(self._body.read(size))

    def close(self) -> None:
        self._body.close()


class _Parts(Incoming):
    """Sent as it comes, a part at a time; the local file is what its rows are checked on."""

    def __init__(self, bucket: Bucket, key: str, part: Path) -> None:
        self._bucket, self._key, self._part = bucket, key, part
        self._waiting = bytearray()
        self._upload: str | None = None
        self._sent: list[dict[str, Any]] = []
        self._done = False

    def write(self, data: bytes) -> None:
        self._waiting += data
        while len(self._waiting) >= 2 * PART:  # so that no part but the last can be short
            self._send(bytes(self._waiting[:PART]))
            del self._waiting[:PART]

    def finish(self) -> None:
        if self._upload is None and len(self._waiting) <= PART:
            self._done = True  # whatever comes of it, it may be there
            self._bucket.write(self._key, bytes(self._waiting))
        else:
            while self._waiting:
                self._send(bytes(self._waiting[:PART]))
                del self._waiting[:PART]
            assert self._upload is not None
            self._done = True
            self._bucket.complete(self._key, self._upload, self._sent)
            self._upload = None
        self._part.unlink(missing_ok=True)

    def abort(self) -> None:
        self._part.unlink(missing_ok=True)
        if self._upload is not None or self._done:
            # Aborting an upload does not wait; a later sweep removes what remains.
            threading.Thread(target=self._take_back, name="eft-s3-abort", daemon=True).start()

    def _take_back(self) -> None:
        if self._upload is not None:
            self._bucket.abandon(self._key, self._upload)
        if self._done:
            with suppress(StoreAway):
                self._bucket.delete(self._key)

    def _send(self, data: bytes) -> None:
        if self._upload is None:
            self._upload = self._bucket.begin(self._key)
        self._sent.append(self._bucket.send(self._key, self._upload, len(self._sent) + 1, data))


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _side_by_side(do: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """In the order of the items. The first error ends it; what has not begun is not begun."""
    every = list(items)
    if len(every) <= 1:
        return [do(item) for item in every]
    stopped = threading.Event()

    def guarded(item: A) -> T:
        if stopped.is_set():
            raise _GivenUp
        try:
            return do(item)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="eft-s3") as pool:
        futures = [pool.submit(guarded, item) for item in every]
        found: list[T] = []
        first: BaseException | None = None
        for future in futures:
            error = future.exception()
            if error is None:
                found.append(future.result())
            elif first is None or isinstance(first, _GivenUp):
                first = error
    if first is not None:
        raise first
    return found
