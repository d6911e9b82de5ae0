"""Parquet by pyarrow: one page at a time, one row at a time, and limits on what a small file may swell to.

What a file would take when decoded is told by its directory and, since that may lie, by the headers of its pages
(parquet_pages.py). More than `MAX_GROUP_BYTES` in one row group, `MAX_PAGE_BYTES` in one page, or `MAX_SWELL` times the
file in all is refused before anything is decoded. A string that a dictionary holds once and rows name a million times
would pass that, so strings are read as dictionaries and become Python's one row at a time, after their lengths were
added up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.data.containers.parquet_pages import DELTA_BYTE_ARRAY, DELTA_ENCODINGS, BadPage, Page, pages
from core.data.faults import MAX_ROW_BYTES, Faults
from core.data.formats.settle import KNOWN

MAX_GROUP_BYTES = 2 << 30
MAX_GROUP_VALUES = 1 << 25
"""Of all columns of a row group that are read. A run of nulls takes no bytes in a file, and many in memory."""
MAX_PAGE_BYTES = 256 << 20
MAX_SWELL = 1000
SMALLEST = 64 << 10
"""A file counts as this large at least when it is asked how far it swells."""
VALUE_BYTES = 8
"""What a value counts for, however it is written."""
MAX_DIRECTORY_BYTES = 32 << 20
MAX_FIXED_BYTES = 1024
BATCH_ROWS = 256
_ALSO = {"functions", "history"}
"""Columns that are read to be refused: ignoring them would train something else than was meant."""


def rows(
    path: Path, columns: Mapping[str, str], faults: Faults, *, everything: bool, place: tuple[int, int, int] = (0, 0, 0)
) -> Iterator[tuple[tuple[int, int, int], int, dict[str, Any] | None]]:
    """((row group, rows of it that are done, rows in all), number, value) of every row behind `place`.

    A null at the top is an absent key: a table has no other way to say so. `everything`: read columns that no format
    knows too. A value of None is a row that is too long; the fault is added.
    """
    import pyarrow as pa

    try:
        yield from _rows(path, columns, faults, everything, place)
    except BadPage as error:
        faults.add_file("unreadable_file", f"the Parquet file cannot be read: {error}")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError, UnicodeDecodeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        faults.add_file("unreadable_file", f"the Parquet file cannot be read: {said[:200]}")
    except (pa.ArrowMemoryError, MemoryError):
        faults.add_file(
            "too_large", "the Parquet file needs more memory to decode than there is; make smaller row groups"
        )


def _rows(
    path: Path, columns: Mapping[str, str], faults: Faults, everything: bool, place: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, int, int], int, dict[str, Any] | None]]:
    import pyarrow.parquet as pq

    before = faults.count
    _check_directory(path, faults)
    if faults.count > before:
        return
    with pq.ParquetFile(path, pre_buffer=False) as file:
        metadata, schema = file.metadata, file.schema_arrow
    wanted = _wanted(schema, columns, faults, everything)
    for name in wanted:
        _check_type(schema.field(name).type, name, faults)
    leaves = _checked_sizes(path, metadata, wanted, faults)
    if faults.count > before:
        return
    first, done, number = place
    # Buffered: without that whole columns of a row group are read into memory.
    with pq.ParquetFile(path, read_dictionary=leaves, pre_buffer=False, buffer_size=1 << 20) as file:
        for group in range(first, metadata.num_row_groups):
            at = 0
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False):
                if at + batch.num_rows <= done:
                    at += batch.num_rows
                    continue
                arrays = list(zip(batch.schema.names, batch.columns, strict=True))
                light = sum(size_of(array) for _, array in arrays) <= MAX_ROW_BYTES
                for row in range(max(0, done - at), batch.num_rows):
                    number += 1
                    value: dict[str, Any] | None = None
                    if light or sum(size_of(array.slice(row, 1)) for _, array in arrays) <= MAX_ROW_BYTES:
                        value = {name: cell for name, array in arrays if (cell := array[row].as_py()) is not None}
                    else:
                        faults.number = number
                        faults.add("too_long", f"a row has at most {MAX_ROW_BYTES >> 20} MiB")
                    yield (group, at + row + 1, number), number, value
                at += batch.num_rows
            done = 0


def size_of(array: Any) -> int:
    """Bytes of an Arrow array's texts as Python would have them, and VALUE_BYTES for every other value or element."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        if len(array) == 0:
            return 0
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return len(array) * VALUE_BYTES + sum(map(size_of, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return len(array) * VALUE_BYTES + size_of(array.flatten())
    if pa.types.is_map(kind):
        entries = [array.keys, array.items] if len(array) and not array.offset else _entries(array)
        return len(array) * VALUE_BYTES + sum(map(size_of, entries))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return pc.sum(pc.cast(pc.binary_length(array), pa.int64())).as_py() or 0
    return len(array) * VALUE_BYTES


def _entries(array: Any) -> list[Any]:
    """Keys and items of a slice of a map: those properties have all of them."""
    if not len(array):
        return []
    begin, end = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
    return [array.keys.slice(begin, end - begin), array.items.slice(begin, end - begin)]


# --- before anything is decoded ------------------------------------------------------------------------


def _check_directory(path: Path, faults: Faults) -> None:
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 8))
        end = stream.read()
    size = int.from_bytes(end[:4], "little")
    if end[4:] == b"PAR1" and size > MAX_DIRECTORY_BYTES:
        faults.add_file("too_large", f"its directory has {size} bytes, more than {MAX_DIRECTORY_BYTES}")


def _wanted(schema: Any, columns: Mapping[str, str], faults: Faults, everything: bool) -> list[str]:
    names = list(schema.names)
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        faults.add_file("invalid_parquet", f"the column {double[:40]!r} stands twice")
        return []
    known = KNOWN | set(columns.values()) | _ALSO
    found = names if everything or "reference" in names else [name for name in names if name in known]
    if not set(found) & known:
        shown = ", ".join(f"`{name[:40]}`" for name in names[:8]) or "none"
        faults.add_file("unknown_format", f"no column is one of a format; found {shown}: map them with `columns`")
    return found


def _read(metadata: Any, group: int, wanted: list[str]) -> Iterator[tuple[int, Any]]:
    """(number, column chunk) of what is read of a row group."""
    chunks = metadata.row_group(group)
    for at in range(metadata.num_columns):
        column = chunks.column(at)
        if column.path_in_schema.partition(".")[0] in wanted:
            yield at, column


@dataclass(slots=True)
class _Leaf:
    """What the pages of one column say, of all row groups."""

    dictionary: int = 0
    """Bytes of its largest dictionary."""
    delta: bool = False
    """It has pages that pyarrow does not read as dictionaries."""
    longest: int = 0
    """Bytes that a value has at most where nothing holds it once: it repeats all of the one before it, or of the
    dictionary."""
    at_once: int = 0
    """Values that are decoded together, at most."""


class _TooLarge(Exception):
    """The words are for a fault."""


def _checked_sizes(path: Path, metadata: Any, wanted: list[str], faults: Faults) -> list[str]:
    """Paths of the columns to read as dictionaries. Adds a fault for what would swell. Raises BadPage."""
    leaves: dict[int, _Leaf] = {}
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _measure(descriptor, metadata, wanted, leaves)
    except _TooLarge as error:
        faults.add_file("too_large", str(error))
    finally:
        os.close(descriptor)
    found = [at for at, leaf in leaves.items() if leaf.dictionary and not leaf.delta]
    return [metadata.row_group(0).column(at).path_in_schema for at in found]


def _measure(descriptor: int, metadata: Any, wanted: list[str], leaves: dict[int, _Leaf]) -> None:
    file_bytes = os.fstat(descriptor).st_size
    left = max(10_000, file_bytes // 128)
    total = 0
    for group in range(metadata.num_row_groups):
        size = values = 0
        for at, column in _read(metadata, group, wanted):
            leaf = leaves.setdefault(at, _Leaf())
            told, found = max(column.total_uncompressed_size, 0), 0
            for page in pages(descriptor, *_place(column), column.num_values):
                left -= 1
                if left < 0:
                    raise BadPage("it has more pages than rows are worth")
                _look(page, metadata.schema.column(at), leaf, group)
                found += page.size
                values += page.values
            size += max(told, found)
        if size > MAX_GROUP_BYTES:
            words = f"row group {group + 1} has {size} bytes when decoded, more than {MAX_GROUP_BYTES}"
            raise _TooLarge(f"{words}; write smaller row groups")
        if values > MAX_GROUP_VALUES:
            words = f"row group {group + 1} has {values} values, more than {MAX_GROUP_VALUES}"
            raise _TooLarge(f"{words}; write smaller row groups")
        total += max(size, values * VALUE_BYTES)
        if total > MAX_SWELL * max(file_bytes, SMALLEST):
            words = f"{file_bytes} bytes would become {total} and more when decoded"
            raise _TooLarge(f"{words}, over {MAX_SWELL} times as many")


def _look(page: Page, column: Any, leaf: _Leaf, group: int) -> None:
    if page.size > MAX_PAGE_BYTES:
        words = f"row group {group + 1} has a page of {page.size} bytes when decoded, more than {MAX_PAGE_BYTES}"
        raise _TooLarge(f"{words}; write smaller pages")
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY" and column.length > MAX_FIXED_BYTES:
        raise _TooLarge(f"{column.path}: values of {column.length} bytes each are no text")
    if column.physical_type != "BYTE_ARRAY":
        return
    if page.dictionary:
        if page.values * 4 > page.size:  # each begins with its length
            raise BadPage(f"a dictionary of {page.size} bytes cannot have {page.values} values")
        leaf.dictionary = max(leaf.dictionary, page.size)
    else:
        flat = column.max_repetition_level == 0
        leaf.at_once = max(leaf.at_once, min(page.values, BATCH_ROWS) if flat else page.values)
        leaf.delta |= page.encoding in DELTA_ENCODINGS
    if page.dictionary or page.encoding == DELTA_BYTE_ARRAY:
        leaf.longest = max(leaf.longest, page.size)
    if leaf.delta and leaf.longest * leaf.at_once > MAX_GROUP_BYTES:
        raise _TooLarge(
            f"{column.path}: so large pages cannot be read in their encoding (DELTA_BYTE_ARRAY); write PLAIN"
        )


def _place(column: Any) -> tuple[int, int]:
    """(offset, length) of a column chunk, as pyarrow finds it."""
    start = column.data_page_offset
    dictionary = column.dictionary_page_offset
    if column.has_dictionary_page and dictionary is not None and 0 < dictionary < start:
        start = dictionary
    length = column.total_compressed_size
    if start < 0 or length < 0:
        raise BadPage("a column lies outside the file")
    return start, length


def _check_type(kind: Any, where: str, faults: Faults) -> None:
    """A struct has the keys of all rows in every row, so it cannot hold the arguments of one call among many."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        for field in kind:
            place = f"{where}.{field.name}"
            if field.name in ("arguments", "parameters") and pa.types.is_struct(field.type):
                words = "as a Parquet struct every row would have the keys of all rows; store it as JSON text"
                faults.add_file("unsupported_field", f"{place}: {words}")
                return
            _check_type(field.type, place, faults)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_type(kind.value_type, f"{where}[]", faults)
