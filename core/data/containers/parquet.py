"""Parquet by pyarrow: one page at a time, one row at a time, and limits on what a small file may swell to.

What a file would take when decoded is told by its directory and, since that may lie, by the headers of its pages
(parquet_pages.py). More than `MAX_GROUP_BYTES` in one row group, `MAX_PAGE_BYTES` in one page, or `MAX_SWELL` times the
file in all is refused before anything is decoded. A string that a dictionary holds once and rows name a million times
would pass that, so strings are read as dictionaries and become Python's one row at a time, after their lengths were
added up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.data.containers.parquet_pages import DELTA_BYTE_ARRAY, DELTA_ENCODINGS, BadPage, Page, pages
from core.data.containers.record import wrong_columns
from core.data.faults import MAX_ROW_BYTES, Faults
from core.data.formats.settle import KNOWN
from core.data.mapping import proposed

MAX_GROUP_BYTES = 2 << 30
MAX_GROUP_VALUES = 1 << 25
"""Most values of a row group in the columns that are read. A run of nulls is small in the file and large in memory."""
MAX_PAGE_BYTES = 256 << 20
MAX_SWELL = 1000
SMALLEST = 64 << 10
"""A file counts as this large at least when it is asked how far it swells."""
VALUE_BYTES = 8
"""What a value counts for, however it is written."""
MAX_DIRECTORY_BYTES = 32 << 20
MAX_FIXED_BYTES = 1024
MAX_ROWS_FREE, ROW_BYTES = 100_000, 4
"""So many rows may take any number of bytes, and beyond that a row takes so many of the file: rows that repeat one
another cost next to nothing in a file, and each its time when it is read."""
MAX_VALUES_FREE, VALUES_A_BYTE = 1_000_000, 8
"""The same of values, nulls among them, in all columns that are read."""
MAX_DEPTH = 60
"""Deepest nesting of lists and structs, as for JSON."""
BATCH_ROWS = 256
BATCH_BYTES = 64 << 20
DICTIONARY_BYTES = 4096
"""pyarrow hands out a copy of the dictionaries with every batch, so a batch has a row for each so many bytes of them,
and more than BATCH_ROWS of them take BATCH_BYTES at most."""
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
    except RecursionError:
        faults.add_file("unreadable_file", "the Parquet file cannot be read: it is nested too deeply")
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
        _check_type(schema.field(name).type, name[:40], faults)
    if faults.count > before:
        return
    leaves, batch_rows = _checked_sizes(path, metadata, wanted, faults)
    if faults.count > before:
        return
    first, done, number = place
    # Buffered: without that whole columns of a row group are read into memory.
    with pq.ParquetFile(path, read_dictionary=leaves, pre_buffer=False, buffer_size=1 << 20) as file:
        for group in range(first, metadata.num_row_groups):
            at = 0
            for batch in file.iter_batches(batch_rows, row_groups=[group], columns=wanted, use_threads=False):
                if at + batch.num_rows <= done:
                    at += batch.num_rows
                    continue
                arrays = list(zip(batch.schema.names, batch.columns, strict=True))
                sizes = sum((row_sizes(array) for _, array in arrays), np.zeros(batch.num_rows, np.int64))
                for row in range(max(0, done - at), batch.num_rows):
                    number += 1
                    value: dict[str, Any] | None = None
                    if sizes[row] <= MAX_ROW_BYTES:
                        value = {name: cell for name, array in arrays if (cell := array[row].as_py()) is not None}
                    else:
                        faults.number = number
                        faults.add("too_long", f"a row has at most {MAX_ROW_BYTES >> 20} MiB")
                    yield (group, at + row + 1, number), number, value
                at += batch.num_rows
            done = 0


def row_sizes(array: Any) -> NDArray[np.int64]:
    """Sizes of the rows of an Arrow array: bytes of their texts in Python, and VALUE_BYTES for every other value or
    element."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, count = array.type, len(array)
    if pa.types.is_dictionary(kind):
        lengths = np.append(_filled(pc.binary_length(array.dictionary)), 0)  # a null's: the last one
        return lengths[_filled(array.indices, -1)]
    if pa.types.is_struct(kind):
        parts = [row_sizes(part) for part in array.flatten()]
        return np.asarray(np.sum([*parts, np.full(count, VALUE_BYTES, np.int64)], axis=0))
    if pa.types.is_fixed_size_list(kind):
        inner = row_sizes(array.values.slice(array.offset * kind.list_size, count * kind.list_size))
        return np.asarray(inner.reshape(count, kind.list_size).sum(axis=1) + VALUE_BYTES)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_sizes(array, array.values)
    if pa.types.is_map(kind):
        return _list_sizes(array, array.keys, array.items)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return _filled(pc.binary_length(array))
    return np.full(count, VALUE_BYTES, np.int64)


def _list_sizes(array: Any, *children: Any) -> NDArray[np.int64]:
    """Sizes of lists, whose elements lie side by side in each of the children."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    begin, end = offsets[0], offsets[-1]
    sizes = np.full(len(array), VALUE_BYTES, np.int64)
    for child in children:
        until = np.concatenate(([0], np.cumsum(row_sizes(child.slice(begin, end - begin)))))
        sizes += np.diff(until[offsets - begin])
    return sizes


def _filled(array: Any, null: int = 0) -> NDArray[np.int64]:
    return np.asarray(array.fill_null(null).to_numpy(zero_copy_only=False)).astype(np.int64)


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
    if (words := wrong_columns(names)) is not None:
        faults.add_file("invalid_parquet", words)
        return []
    known = KNOWN | set(columns.values()) | _ALSO
    found = names if everything or "reference" in names else [name for name in names if name in known]
    if not set(found) & known:
        shown = ", ".join(f"`{name[:40]}`" for name in names[:8]) or "none"
        way_out = proposed(names or ["question"])
        faults.add_file("unknown_format", f"no column is one of a format; found {shown}: map them, such as {way_out}")
    for name in names:
        if name not in found:
            faults.ignore(name, is_text=str(schema.field(name).type) in ("string", "large_string"))
    return found


def _read(metadata: Any, group: int, wanted: Set[str]) -> Iterator[tuple[int, Any]]:
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


def _checked_sizes(path: Path, metadata: Any, wanted: list[str], faults: Faults) -> tuple[list[str], int]:
    """Paths of the columns to read as dictionaries, and how many rows to read at once. Adds a fault for what would
    swell. Raises BadPage."""
    leaves: dict[int, _Leaf] = {}
    size = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = _measure(descriptor, metadata, frozenset(wanted), leaves)
    except _TooLarge as error:
        faults.add_file("too_large", str(error))
    finally:
        os.close(descriptor)
    found = [at for at, leaf in leaves.items() if leaf.dictionary and not leaf.delta]
    dictionaries = sum(leaves[at].dictionary for at in found)
    roomy = BATCH_BYTES * metadata.num_rows // max(size, 1)
    paths = [metadata.row_group(0).column(at).path_in_schema for at in found]
    return paths, max(BATCH_ROWS, min(dictionaries // DICTIONARY_BYTES, roomy))


def _measure(descriptor: int, metadata: Any, wanted: Set[str], leaves: dict[int, _Leaf]) -> int:
    """Bytes of what is read, when decoded."""
    file_bytes = os.fstat(descriptor).st_size
    left = max(10_000, file_bytes // 128)
    headers_left = file_bytes
    total = all_values = 0
    if metadata.num_rows > max(MAX_ROWS_FREE, file_bytes // ROW_BYTES):
        words = f"{file_bytes} bytes hold {metadata.num_rows} rows, fewer than {ROW_BYTES} bytes a row"
        raise _TooLarge(f"{words}: its rows repeat one another; leave the doubles out")
    for group in range(metadata.num_row_groups):
        size = values = 0
        for at, column in _read(metadata, group, wanted):
            leaf = leaves.setdefault(at, _Leaf())
            told, found = max(column.total_uncompressed_size, 0), 0
            for page in pages(descriptor, *_place(column), column.num_values):
                left -= 1
                headers_left -= page.header
                if left < 0 or headers_left < 0:  # many columns may lie at one place of the file
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
        all_values += values
        if all_values > max(MAX_VALUES_FREE, file_bytes * VALUES_A_BYTE):
            words = f"{file_bytes} bytes hold {all_values} values and more, over {VALUES_A_BYTE} a byte"
            raise _TooLarge(f"{words}: its rows repeat one another, or have many empty columns; leave them out")
        total += max(size, values * VALUE_BYTES)
        if total > MAX_SWELL * max(file_bytes, SMALLEST):
            words = f"{file_bytes} bytes would become {total} and more when decoded"
            raise _TooLarge(f"{words}, over {MAX_SWELL} times as many")
    return total


def _look(page: Page, column: Any, leaf: _Leaf, group: int) -> None:
    if page.size > MAX_PAGE_BYTES:
        words = f"row group {group + 1} has a page of {page.size} bytes when decoded, more than {MAX_PAGE_BYTES}"
        raise _TooLarge(f"{words}; write smaller pages")
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY" and column.length > MAX_FIXED_BYTES:
        raise _TooLarge(f"{column.path}: values of {column.length} bytes each are not text")
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


def _check_type(kind: Any, where: str, faults: Faults, depth: int = 0) -> None:
    """A struct has the keys of all rows in every row, so it cannot hold the arguments of one call among many."""
    import pyarrow as pa

    if depth > MAX_DEPTH:
        faults.add_file("invalid_parquet", f"{where[:80]}: it is nested more than {MAX_DEPTH} levels deep")
        return
    if pa.types.is_struct(kind):
        for field in kind:
            place = f"{where}.{field.name}"
            if field.name in ("arguments", "parameters") and pa.types.is_struct(field.type):
                words = "as a Parquet struct every row would have the keys of all rows; store it as JSON text"
                faults.add_file("unsupported_field", f"{place}: {words}")
                return
            _check_type(field.type, place, faults, depth + 1)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _check_type(kind.value_type, f"{where}[]", faults, depth + 1)
    elif pa.types.is_map(kind):
        _check_type(kind.item_type, f"{where}{{}}", faults, depth + 1)
