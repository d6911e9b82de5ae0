"""Files of a hub data set as JSON Lines, where they are of a container that uploads do not have, or a part of them is
asked for.

`datasets` (https://huggingface.co/docs/datasets) reads what it reads without code: compressed JSON, CSV and text,
Arrow, tab-separated files, WebDataset archives. It is given files that lie here, by the name of the reader, so it asks
no hub and finds no script to run.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from core.data.containers.read import values
from core.data.faults import Faults
from core.data.stream import faulty
from core.errors import DataError, NoSpace

AS_THEY_ARE = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
"""Files that the trainer reads itself (core/data/containers)."""
READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
"""Suffix → reader of `datasets`."""
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
TEXTS = ("txt", "text", "transcript", "json", "cls", "cls2", "index", "inx", "id")
"""Members of a WebDataset archive that are rows' text; all others are left out."""
TELL_ROWS = 1000
ROOM_BYTES = 64 << 20
"""How often the disk's free space is looked at."""

OnRows = Callable[[int], None]


def suffix_of(name: str) -> str:
    """`.json` of `train.json.gz`; empty for a file that nothing here reads."""
    path = Path(name)
    if path.suffix in PACKED:
        path = path.with_suffix("")
        if path.suffix not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt"):
            return ""
    return path.suffix if path.suffix in READERS else ""


def is_read_as_it_is(name: str, options: Mapping[str, Any]) -> bool:
    """`options`: what the card says about how to read it."""
    return not options and name.endswith(AS_THEY_ARE)


def write_rows(
    files: Sequence[tuple[str, Path]],
    options: Mapping[str, Any],
    columns: Mapping[str, str],
    part: str | None,
    out: Path,
    field: str,
    told: OnRows,
) -> int:
    """Write the rows of files (names in the repository, and where they lie) to `out`, and count them.

    `columns`: our names of the files' columns, as far as they have others. `part`: a slice as `datasets` writes it,
    such as `:10%` or `100:200`; None: all rows. DataError when a file cannot be read, NoSpace.
    """
    start, end = (
        (0, None) if part is None else _bounds(part, lambda: _count(files, options, columns, field, told), field)
    )
    count = written = 0
    with out.open("w", encoding="utf-8") as stream:
        for row in islice(_rows(files, options, columns, field), start, end):
            line = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            stream.write(line + "\n")
            count += 1
            written += len(line)
            if count % TELL_ROWS == 0:
                told(count)
            if written > ROOM_BYTES:
                written = 0
                _check_room(out)
    return count


def _count(
    files: Sequence[tuple[str, Path]], options: Mapping[str, Any], columns: Mapping[str, str], field: str, told: OnRows
) -> int:
    count = 0
    for count, _ in enumerate(_rows(files, options, columns, field), 1):
        if count % TELL_ROWS == 0:
            told(0)
    return count


def _bounds(part: str, count: Callable[[], int], field: str) -> tuple[int, int]:
    """First row and the row behind the last one, with the rounding of `datasets`."""
    with _library() as datasets:
        rows = count()
        try:
            (found,) = datasets.ReadInstruction.from_spec(f"rows[{part}]").to_absolute({"rows": rows})
        except (ValueError, AssertionError) as error:
            words = f"`[{part}]` is not a slice of {rows} rows: {error}"
            raise DataError(words, field=f"{field}.split", code="dataset_not_found") from error
    return found.from_ or 0, rows if found.to is None else found.to


def _rows(
    files: Sequence[tuple[str, Path]], options: Mapping[str, Any], columns: Mapping[str, str], field: str
) -> Iterator[dict[str, Any]]:
    for name, path in files:
        if is_read_as_it_is(name, options):
            yield from _native(path, name, columns)
        else:
            yield from _read(name, path, options, field)


def _native(path: Path, name: str, columns: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """As training reads the file: every value stays what it is."""
    faults = Faults(columns)
    for _, _, value in values(path, columns, faults, everything=True):
        if faults.count:
            raise faulty(Path(name), faults)
        yield {key: item for key, item in ((key, _plain(item)) for key, item in value.items()) if item is not _LOST}
    if faults.count:
        raise faulty(Path(name), faults)


def _read(name: str, path: Path, options: Mapping[str, Any], field: str) -> Iterator[dict[str, Any]]:
    reader = READERS[suffix_of(name)]
    arguments = ({"sep": "\t"} if suffix_of(name) == ".tsv" else {}) | dict(options)
    with _library() as datasets, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        from datasets.packaged_modules.webdataset.webdataset import WebDataset

        decoders = WebDataset.DECODERS
        WebDataset.DECODERS = {key: read for key, read in decoders.items() if key in TEXTS}
        try:
            # Its name says how it is compressed; what it is called here does not.
            link = Path(scratch) / Path(name).name
            link.symlink_to(path.resolve())
            found = datasets.load_dataset(
                reader, data_files=[str(link)], split="train", streaming=True, cache_dir=scratch, **arguments
            )
            if found.features is not None:
                found = found.decode(False)
            for row in found:
                yield _flat(row, archive=reader == "webdataset")
        except (DataError, NoSpace, GeneratorExit, MemoryError):
            raise
        except Exception as error:  # whatever a reader raises for a file that is not what its name says
            said = " ".join(str(error).split())[:300]
            words = f"{name} cannot be read as {reader}: {type(error).__name__}: {said}"
            raise DataError(words, field=field, code="dataset_unreadable") from error
        finally:
            WebDataset.DECODERS = decoders


def _flat(row: Mapping[str, Any], *, archive: bool) -> dict[str, Any]:
    """Columns that hold text. The `json` member of an archive's sample gives its own keys."""
    plain = {key: _plain(value) for key, value in row.items() if not (archive and key.startswith("__"))}
    inner = plain.pop("json", None) if archive and isinstance(plain.get("json"), dict) else None
    return {key: value for key, value in (plain | (inner or {})).items() if value is not _LOST}


_LOST = object()
"""What is no text and no number: an image, a sound."""


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            found = [_plain(item) for item in value]
            return _LOST if any(item is _LOST for item in found) else found
        case dict():
            inner = {str(key): _plain(item) for key, item in value.items()}
            return _LOST if any(item is _LOST for item in inner.values()) else inner
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case _:
            return _LOST


def _check_room(out: Path) -> None:
    if shutil.disk_usage(out.parent).free < 2 * ROOM_BYTES:
        words = f"the rows of the data set, unpacked, fill the disk of {out.parent}; free some space"
        raise NoSpace(words, field="data.train", needs_bytes=4 * ROOM_BYTES)


@contextmanager
def _library() -> Iterator[Any]:
    """`datasets`, without a network, without counting downloads, and with no bar drawn."""
    names = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        import datasets

        drawn = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            yield datasets
        finally:
            if not drawn:
                datasets.enable_progress_bars()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
