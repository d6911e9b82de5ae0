"""Server-sent events, as the HTML standard's "event stream interpretation" reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    id: str | None
    event: str
    data: str


class Decoder:
    """Cuts a byte stream into messages; comments (keep-alives) and an unfinished last message give none."""

    def __init__(self) -> None:
        self._rest = b""
        self._identity: str | None = None
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Message]:
        for line in self._lines(chunk):
            if not line:
                if self._data:
                    yield Message(self._identity, self._event or "message", "\n".join(self._data))
                self._event, self._data = "", []
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match name:
                case "id":
                    self._identity = value
                case "event":
                    self._event = value
                case "data":
                    self._data.append(value)
                case _:
                    pass  # a comment (empty name), `retry`, or a field of a later standard

    def _lines(self, chunk: bytes) -> list[str]:
        # Only CR, LF and CRLF end a line; str.splitlines would also cut at U+2028 and others inside the data.
        whole = self._rest + chunk
        # A CR at the very end may be half of a CRLF.
        ready, held = (whole[:-1], b"\r") if whole.endswith(b"\r") else (whole, b"")
        *lines, rest = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        return [line.decode(errors="replace") for line in lines]


def messages(chunks: Iterable[bytes]) -> Iterator[Message]:
    """All messages of a stream."""
    decoder = Decoder()
    for chunk in chunks:
        yield from decoder.feed(chunk)
