"""Parquet by pyarrow: one row group's pages at a time, one row at a time, and limits on what a small file may swell to.

A Parquet file says how large its column chunks are when decoded; more than `MAX_GROUP_BYTES` in one row group, or more
than `MAX_SWELL` times the file, is refused before anything is decoded. A string that a dictionary holds once and rows
name a million times would pass that, so strings are read as dictionaries and become Python's one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.data.faults import MAX_ROW_BYTES, Faults
from core.data.formats.settle import KNOWN

MAX_GROUP_BYTES = 2 << 30
MAX_SWELL = 1000
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    before = faults.count
    wanted = _wanted(schema, columns, faults, everything)
    leaves = _sizes_checked(metadata, wanted, path.stat().st_size, faults)
    for name in wanted:
        _check_type(schema.field(name).type, name, faults)
    if faults.count > before:
        return
    first, done, number = place
    with pq.ParquetFile(path, read_dictionary=leaves) as file:
        for group in range(first, metadata.num_row_groups):
            at = 0
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False):
                if at + batch.num_rows <= done:
                    at += batch.num_rows
                    continue
                arrays = list(zip(batch.schema.names, batch.columns, strict=True))
                for row in range(max(0, done - at), batch.num_rows):
                    number += 1
                    value = {name: cell for name, array in arrays if (cell := array[row].as_py()) is not None}
                    if _size(value) > MAX_ROW_BYTES:
                        faults.number = number
                        faults.add("too_long", f"a row has at most {MAX_ROW_BYTES >> 20} MiB")
                        value = None  # type: ignore[assignment]
                    yield (group, at + row + 1, number), number, value
                at += batch.num_rows
            done = 0
    assert isinstance(schema, pa.Schema)


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


def _sizes_checked(metadata: Any, wanted: list[str], file_bytes: int, faults: Faults) -> list[str]:
    """Paths of the leaf columns that are strings. Adds a fault for what would swell."""
    leaves: list[str] = []
    total = 0
    for group in range(metadata.num_row_groups):
        of_group = 0
        for at in range(metadata.num_columns):
            column = metadata.row_group(group).column(at)
            if column.path_in_schema.partition(".")[0] not in wanted:
                continue
            of_group += max(column.total_uncompressed_size, 0)
            if group == 0 and column.physical_type == "BYTE_ARRAY":
                leaves.append(column.path_in_schema)
        total += of_group
        if of_group > MAX_GROUP_BYTES:
            words = f"row group {group + 1} has {of_group} bytes when decoded, more than {MAX_GROUP_BYTES}"
            faults.add_file("too_large", f"{words}; write smaller row groups")
            return leaves
    if total > MAX_SWELL * max(file_bytes, 1 << 20):
        words = f"{file_bytes} bytes would become {total} when decoded, more than {MAX_SWELL} times as many"
        faults.add_file("too_large", words)
    return leaves


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


def _size(value: Any) -> int:
    match value:
        case str() | bytes():
            return len(value)
        case dict():
            return sum(map(_size, value.values()))
        case list():
            return sum(map(_size, value))
        case _:
            return 8
