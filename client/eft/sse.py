"""Server-sent events, as the HTML standard's "event stream interpretation" reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    id: str | None
    event: str
    data: str


def messages(chunks: Iterable[bytes]) -> Iterator[Message]:
    """Cut a byte stream into messages; comments (keep-alives) and an unfinished last message give none."""
    identity: str | None = None
    event = ""
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield Message(identity, event or "message", "\n".join(data))
            event, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                identity = value
            case "event":
                event = value
            case "data":
                data.append(value)
            case _:
                pass  # a comment (empty name), `retry`, or a field of a later standard


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    # Only CR, LF and CRLF end a line; str.splitlines would also cut at U+2028 and others inside the data.
    rest = b""
    for chunk in chunks:
        rest += chunk
        # A CR at the very end may be half of a CRLF.
        ready, rest = (rest[:-1], b"\r") if rest.endswith(b"\r") else (rest, b"")
        parts = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = parts.pop() + rest
        for part in parts:
            yield part.decode(errors="replace")
