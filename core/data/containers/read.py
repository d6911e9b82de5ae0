"""From a file to its values, one after another, from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, assert_never

from core.data.containers import parquet
from core.data.containers.csv_file import CsvRecords
from core.data.containers.json_array import JsonArray
from core.data.containers.jsonl import JsonLines
from core.data.containers.record import Container, Record, Splitter
from core.data.containers.sniff import HEAD_BYTES, NotRows, sniff
from core.data.faults import Faults, Unit

CHUNK_BYTES = 256 << 10

Place = list[int]
"""Where reading goes on in a file: [offset, number] of text, [row group, rows done in it, number] of Parquet."""


def unit_of(container: Container) -> Unit:
    return "line" if container in ("jsonl", "csv") else "row"


def what_is(path: Path, columns: Mapping[str, str]) -> Container:
    """Raises NotRows, OSError."""
    with path.open("rb") as stream:
        return sniff(stream.read(HEAD_BYTES), columns)


def values(
    path: Path, columns: Mapping[str, str], faults: Faults, *, everything: bool = False, place: Place | None = None
) -> Iterator[tuple[Place, int, Any]]:
    """(place behind it, line or row number, value) of every record behind `place`. What is no record is added to
    `faults` and left out. Raises OSError."""
    try:
        container = what_is(path, columns)
    except NotRows as error:
        faults.add_file(error.code, str(error))
        return
    faults.unit = unit_of(container)
    match container:
        case "parquet":
            at = (0, 0, 0) if place is None else (place[0], place[1], place[2])
            for behind, number, value in parquet.rows(path, columns, faults, everything=everything, place=at):
                if value is not None:
                    yield list(behind), number, value
        case "jsonl" | "json" | "csv":
            yield from _text_values(path, container, columns, faults, place or [0, 0])
        case _ as never:
            assert_never(never)


def splitter(container: Container, columns: Mapping[str, str]) -> Splitter:
    """A text file's reader, at its beginning."""
    match container:
        case "jsonl":
            return JsonLines()
        case "json":
            return JsonArray()
        case "csv":
            return CsvRecords(columns)
        case "parquet":
            raise ValueError("Parquet is not read as a stream of bytes")
        case _ as never:
            assert_never(never)


def _text_values(
    path: Path, container: Container, columns: Mapping[str, str], faults: Faults, place: Place
) -> Iterator[tuple[Place, int, Any]]:
    with path.open("rb") as stream:
        offset, number = place
        reader = _resumed(stream, container, columns, offset, number) if number else splitter(container, columns)
        stream.seek(offset)

        def taken(record: Record) -> tuple[Place, int, Any] | None:
            faults.number = record.number
            if record.fault is not None:
                faults.add(*record.fault)
                return None
            before = faults.count
            value = reader.decode(record, faults)
            return None if faults.count > before else ([record.end, reader.number], record.number, value)

        while not reader.finished and (chunk := stream.read(CHUNK_BYTES)):
            for record in reader.feed(chunk):
                if (found := taken(record)) is not None:
                    yield found
        for record in reader.finish():
            if (found := taken(record)) is not None:
                yield found


def _resumed(stream: Any, container: Container, columns: Mapping[str, str], offset: int, number: int) -> Splitter:
    match container:
        case "jsonl":
            return JsonLines(offset, number)
        case "json":
            return JsonArray(offset, number)
        case "csv":
            head = CsvRecords(columns)
            while head.header is None and (chunk := stream.read(HEAD_BYTES)):
                for _ in head.feed(chunk):
                    break
            return CsvRecords(columns, offset, number, head.header)
        case _:
            raise ValueError(f"no place in a {container} file is an offset")
