"""multipart/form-data without spooling: fields are kept, the file's bytes go on as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.errors import BadRequest, nearest, printable

FIELDS = ("file", "purpose", "format", "columns")
MAX_FIELD_BYTES = 1024


class UploadForm:
    """Feed it chunks of a body. `on_field` is called with name and value, `on_file` with the file's name, and `on_data`
    with its bytes: once a chunk for each file, since the parser cuts a file where a boundary might begin, into very
    many pieces, if somebody wants that. Raises BadRequest for a malformed body, unknown fields, and a second file
    unless there may be `several`."""

    def __init__(
        self,
        content_type: str,
        *,
        on_field: Callable[[str, str], None],
        on_file: Callable[[str | None], None],
        on_data: Callable[[bytes], None],
        fields: Sequence[str] = FIELDS,
        several: bool = False,
    ) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary or len(boundary) > 200:
            raise BadRequest("multipart/form-data needs its boundary in the Content-Type", field="content-type")
        self._fields, self._several = fields, several
        self._on_field, self._on_file, self._on_data = on_field, on_file, on_data
        self._header, self._value, self._gathered = bytearray(), bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._seen: set[str] = set()
        self.complete = False
        callbacks: dict[str, Any] = {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise BadRequest(f"the body is not valid multipart/form-data: {error}") from error
        self._flush()

    def finish(self) -> None:
        """Raises BadRequest when the body broke off or had no file."""
        if not self.complete:
            raise BadRequest("the multipart body breaks off before its closing boundary")
        if "file" not in self._seen:
            raise BadRequest("send the data in a form field named `file`", field="file")

    def _part_begin(self) -> None:
        self._headers, self._name = {}, ""
        self._header, self._value = bytearray(), bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name not in self._fields:
            raise BadRequest(
                f"unknown form field `{printable(self._name)}`; {nearest(self._name, list(self._fields))}",
                field=printable(self._name),
            )
        if self._name in self._seen and not (self._several and self._name == "file"):
            raise BadRequest(f"the form field `{self._name}` stands twice", field=self._name)
        self._seen.add(self._name)
        if self._name == "file":
            self._flush()
            filename = options.get(b"filename")
            self._on_file(None if filename is None else _decoded(filename))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._gathered += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise BadRequest(f"the form field `{self._name}` is too long", field=self._name)

    def _part_end(self) -> None:
        if self._name != "file":
            self._flush()
            self._on_field(self._name, _decoded(bytes(self._value)))

    def _end(self) -> None:
        self.complete = True

    def _flush(self) -> None:
        if self._gathered:
            data = bytes(self._gathered)
            self._gathered.clear()
            self._on_data(data)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadRequest("names and fields of a form are UTF-8") from error
