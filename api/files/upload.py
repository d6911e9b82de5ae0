"""One upload on its way to the disk: hashed, counted and checked line by line while it comes in."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, assert_never, get_args

from pydantic import ValidationError

from api.errors import BadRequest, nearest, printable
from api.files.checking import Checkers, RemoteCheck
from core.data.check import FileReport
from core.errors import DataError, NoSpace, TooLarge, beyond
from core.ids import new_id
from core.settings import Settings
from core.spec.axes.data import Column, Format, Readable, RowFormat
from core.storage.layout import Layout
from core.storage.store import Store

log = logging.getLogger("eft.api.files")

SPACE_CHECK_BYTES = 64 << 20
STALE_SECONDS = 24 * 3600.0
FORMATS = get_args(Format)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A checked file at its place on the data root."""

    id: str
    bytes: int
    sha256: str
    format: RowFormat
    report: FileReport


class Upload:
    """`write` until the end, then `finish`; `abort` in every other case. Keeps nothing of a refused file."""

    def __init__(
        self, layout: Layout, store: Store, settings: Settings, checkers: Checkers, *, announced: int = 0
    ) -> None:
        """Raises TooLarge or NoSpace for what is announced, before a byte is read."""
        self._layout, self._settings = layout, settings
        self._too_large = TooLarge(
            f"a file has at most {settings.max_upload_bytes} bytes here; split it, or ask the administrator "
            "(EFT_MAX_UPLOAD_BYTES)",
            field="file",
        )
        if announced > settings.max_upload_bytes:
            raise self._too_large
        layout.require_space(settings.min_free_bytes, announced)
        self.id = new_id("file")
        self._part = layout.uploads / f"{self.id}.part"
        self._incoming = store.incoming(f"files/{self.id}", self._part)
        self._descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._hash = hashlib.sha256()
        self._checkers = checkers
        self._check: RemoteCheck | None = None
        self._format: Format = "auto"
        self._columns: dict[str, str] = {}
        self._bytes = 0
        self._space_checked = 0

    def declare(self, name: Literal["format", "columns"], value: str) -> None:
        """The format that all rows shall have, or the mapping of columns as JSON. Raises BadRequest for one that does
        not exist, or too late."""
        if self._bytes:
            raise BadRequest(f"send `{name}` before `file`: the rows are checked as they come", field=name)
        match name:
            case "format":
                if value not in FORMATS:
                    raise BadRequest(
                        f"unknown format `{printable(value)}`; {nearest(value, list(FORMATS))}", field="format"
                    )
                self._format = value  # type: ignore[assignment]
            case "columns":
                self._columns = _columns(value)
            case _ as never:
                assert_never(never)

    @property
    def declared(self) -> dict[str, Any]:
        """What was said of the rows."""
        return {"format": self._format, "columns": self._columns}

    def write(self, data: bytes) -> None:
        """Raises TooLarge, NoSpace, or DataError as soon as there are more faults than are told."""
        self._bytes += len(data)
        if self._bytes > self._settings.max_upload_bytes:
            raise self._too_large
        if self._bytes - self._space_checked > SPACE_CHECK_BYTES:
            self._space_checked = self._bytes
            self._layout.require_space(self._settings.min_free_bytes)
        check = self._begun()
        check.send(data)
        self._hash.update(data)
        with disk_errors():
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        self._incoming.write(data)
        if (report := check.answer()) is not None:
            self._refuse(report, whole=False)

    def finish(self) -> StoredFile:
        """Make it last and give it its name. Raises DataError for a faulty file, NoSpace."""
        check = self._begun()
        report = check.finish(self._part)
        check.end()
        if not report.ok or report.format is None:
            self._refuse(report)
        assert report.format is not None
        with disk_errors():
            os.fsync(self._descriptor)
            self._close()
            self._incoming.finish()
        return StoredFile(self.id, self._bytes, self._hash.hexdigest(), report.format, report)

    def abort(self) -> None:
        """Leave nothing behind, not even a file that has its name already."""
        self.leave()
        self._close()
        self._incoming.abort()

    def leave(self) -> None:
        """End the check, from whatever thread: nobody waits for it any more."""
        if self._check is not None:
            self._check.end()

    def _begun(self) -> RemoteCheck:
        if self._check is None:
            self._check = self._checkers.begin(self._format, self._columns)
        return self._check

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _refuse(self, report: FileReport, *, whole: bool = True) -> NoReturn:
        first = report.faults[0]
        left = beyond(report.fault_count, [first])
        more = f" (and {left} more)" if left else ""
        where = f"{first.field}: " if first.field else ""
        raise FaultyFile(
            f"{where}{first.message}{more}", field=first.field, faults=report.faults, report=report, whole=whole
        )


class FaultyFile(DataError):
    """A file that was refused, with all that is known of it."""

    def __init__(self, message: str, *, report: FileReport, whole: bool, **about: Any) -> None:
        super().__init__(message, **about)
        self.report, self.whole = report, whole

    def as_dict(self) -> dict[str, Any]:
        report = self.report.as_dict() | {"read_to_end": self.whole}
        del report["faults"]  # they stand beside it
        return super().as_dict() | {"report": report}


def _columns(value: str) -> dict[str, str]:
    """`{"prompt": "question"}`. Raises BadRequest."""
    try:
        given = Readable.model_validate_json(f'{{"columns": {value}}}').columns
        return {str(ours): theirs for ours, theirs in given.items()}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = ", ".join(get_args(Column))
        words = f"`columns` is an object from our names ({names}) to the file's, as JSON: {printable(first['msg'])}"
        raise BadRequest(words, field="columns") from error


class disk_errors:  # noqa: N801 -- reads as a word behind `with`
    """A full disk or quota is an answer for the user, not a defect."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(f"the data root is full ({error.strerror}); nothing of the file was kept") from error


def checked_filename(name: str | None) -> str:
    """A name to show again. Raises BadRequest for one that could pass for a path or for another name."""
    if name is None:
        raise BadRequest("the file has no name: give `filename`", field="filename")
    if not name or name in (".", ".."):
        raise BadRequest("a file's name is not empty, `.` or `..`", field="filename")
    if len(name.encode(errors="surrogatepass")) > 255:
        raise BadRequest("a file's name has at most 255 bytes", field="filename")
    for char in name:
        if char in "/\\":
            raise BadRequest("a file's name must not contain `/` or `\\`", field="filename")
        kind = unicodedata.category(char)
        if kind in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise BadRequest(
                f"a file's name has no control, direction or half characters; this one has U+{ord(char):04X}",
                field="filename",
            )
    return name


def remove_stale(layout: Layout, older_than: float = STALE_SECONDS) -> list[Path]:
    """Parts that a killed process left behind. An upload that is still going on has been written to since."""
    removed = []
    for part in [*layout.uploads.glob("file-*.part"), *layout.uploads.glob("upload-*/*")]:
        try:
            if time.time() - part.stat().st_mtime > older_than:
                part.unlink()
                removed.append(part)
        except FileNotFoundError:
            continue  # its own process was quicker
    for folder in {part.parent for part in removed} - {layout.uploads}:
        with suppress(OSError):  # a part of it is younger
            folder.rmdir()
    if removed:
        log.info("removed %d uploads that a killed process had left behind", len(removed))
    return removed
