"""Small files that would become large ones: refused with a fault, in a process that may not take much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import HOME
from core.data.check import FileCheck, check_file
from core.data.containers import parquet_pages
from core.data.containers.json_array import JsonArray
from core.data.stream import RowStream, content
from core.spec.run.orders import DataOrder

LIMIT = 768 << 20
LOOK = """
import json, resource, sys
from pathlib import Path
import pyarrow.parquet as pq
from core.data.check import FileCheck, check_file

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = {}
for path in sorted(Path(sys.argv[2]).iterdir()):
    report = check_file(path)
    found[path.name] = [report.rows, report.fault_count, *[report.faults[0].code, report.faults[0].message]]
try:  # that the limit is one: what happens to a reader that believes the file
    pq.read_table(Path(sys.argv[2]) / "refs.parquet").to_pylist()
except MemoryError:
    found["believed"] = "MemoryError"
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([found, int(peak.split()[1]) * 1024]))
"""


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize(("depth", "good"), [(50, True), (70, False), (5_000, False)])
def test_what_is_nested_without_end_is_a_fault(tmp_path: Path, kind: str, depth: int, good: bool) -> None:
    parameters = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"name": "f", "parameters": {parameters}}}]'
    messages = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    path = tmp_path / "rows"
    match kind:
        case "jsonl":
            path.write_text(f'{{"tools": {tools}, "messages": {messages}}}\n')
        case "json":
            path.write_text(f'[{{"tools": {tools}, "messages": {messages}}}]')
        case "csv":
            cells = [cell.replace('"', '""') for cell in (tools, messages)]
            path.write_text(f'tools,messages\n"{cells[0]}","{cells[1]}"\n')
        case _:
            pq.write_table(pa.table({"tools": [tools], "messages": [json.loads(messages)]}), path)
    report = check_file(path)
    if good:
        assert report.rows == 1, report.faults
        ((_, numbered),) = RowStream(DataOrder.of(path)).rows()
        assert content(numbered.row)
    else:
        assert report.faults[0].code == "invalid_json", report.faults


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_numbers_that_are_none_are_faults(tmp_path: Path, kind: str, constant: str) -> None:
    row = f'{{"messages": [{{"role": "assistant", "content": "a", "weight": {constant}}}]}}'
    path = tmp_path / "rows"
    quoted = row[13:-1].replace('"', '""')
    path.write_text({"jsonl": row + "\n", "json": f"[{row}]", "csv": f'messages\n"{quoted}"\n'}[kind])
    report = check_file(path)
    assert report.faults[0].code == "invalid_json" and constant in report.faults[0].message, report.faults


def test_faults_without_end_are_not_counted_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 40_000, "completion": pa.nulls(40_000, pa.string())}), path)
    report = check_file(path)
    assert (report.rows, report.faults[0].code) == (0, "missing_field")
    assert 10_000 < report.fault_count < 20_000


# --- forging page headers ------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def i32(field: int, value: int) -> bytes:
    """A field behind the one before it in Thrift's compact protocol."""
    return bytes([field << 4 | 5]) + varint(value << 1 ^ value >> 63)


def forge(path: Path, *, size: int | None = None, values: int | None = None, dictionary: bool = False) -> None:
    """Another uncompressed size or number of values into the first page's header of a file of one column. The header
    keeps its length: in place of its statistics it gets a field that nobody knows."""
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset if dictionary else column.data_page_offset
    raw = path.read_bytes()
    reader = parquet_pages._Compact(raw[start:])
    told = reader.struct()
    inner = told[7 if dictionary else 5]
    body = i32(1, inner[1] if values is None else values) + i32(1, inner[2])
    body += b"" if dictionary else i32(1, inner[3]) + i32(1, inner[4])
    head = i32(1, told[1]) + i32(1, told[2] if size is None else size) + i32(1, told[3])
    head += bytes([(4 if dictionary else 2) << 4 | 12]) + body + b"\0"
    pad = reader.at - len(head) - 3
    assert pad >= 0, "no room for a larger number"
    head += bytes([1 << 4 | 8]) + varint(pad) + b"\0" * pad + b"\0"
    path.write_bytes(raw[:start] + head + raw[start + reader.at :])


def texts(path: Path, rows: list[str], **options: Any) -> Path:
    defaults = {"use_dictionary": False, "compression": "none"}
    pq.write_table(pa.table({"text": rows}), path, **(defaults | options))
    return path


def claims_two_gigabytes(path: Path) -> None:
    forge(texts(path, ["a" * 60] * 5), size=2**31 - 1)


def swells_more_than_it_says(path: Path) -> None:
    forge(texts(path, ["x" * (8 << 20)] * 2, compression="gzip", write_statistics=True), size=60)


def has_a_billion_values(path: Path) -> None:
    forge(texts(path, ["a" * 60] * 5), values=2**30)


def has_too_large_a_dictionary(path: Path) -> None:
    """A dictionary page's header has no room for a much larger number: 8,191 in the bytes of 900."""
    texts(path, [str(n) for n in range(900)] * 2, use_dictionary=True)
    raw = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    header = parquet_pages._Compact(bytes(raw[start:]))
    assert header.struct()[7][1] == 900
    at = raw.index(i32(1, 900), start, start + header.at)
    raw[at : at + 3] = i32(1, 8191)
    path.write_bytes(raw)


def rows_of_many_references(path: Path) -> None:
    """One string of 4 MiB, which each of two rows names a hundred times."""
    one = pa.array(["user", "assistant", "x" * (4 << 20)])
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 100, pa.int32()), one)
    contents = pa.DictionaryArray.from_arrays(pa.array([2] * 200, pa.int32()), one)
    turns = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 100, 200], pa.int32()), turns)
    pq.write_table(pa.table({"messages": chats}), path, dictionary_pagesize_limit=64 << 20)


def may_repeat_the_value_before(path: Path) -> None:
    """In this encoding each of the 300 may be as long as the first one, at no more than two bytes."""
    texts(path, ["x" * (9 << 20)] + ["a"] * 300, column_encoding="DELTA_BYTE_ARRAY")


def has_an_endless_directory(path: Path) -> None:
    raw = texts(path, ["a"] * 3).read_bytes()
    path.write_bytes(raw[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")


def is_nested_deeply(path: Path) -> None:
    path.write_bytes(b'{"text": "a", "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")


def is_one_long_cell(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b"prompt,completion\na,")
        for _ in range(100):
            stream.write(b"x" * (1 << 20))
        stream.write(b"\n")


def is_one_long_row(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b'[{"text": "')
        for _ in range(20):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}]')


BOMBS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "claims.parquet": (claims_two_gigabytes, "too_large", "page of 2147483647 bytes"),
    "swells.parquet": (swells_more_than_it_says, "unreadable_file", "cannot be read"),
    "values.parquet": (has_a_billion_values, "too_large", "1073741824 values"),
    "dictionary.parquet": (has_too_large_a_dictionary, "unreadable_file", "cannot have"),
    "refs.parquet": (rows_of_many_references, "too_long", "16 MiB"),
    "delta.parquet": (may_repeat_the_value_before, "too_large", "DELTA_BYTE_ARRAY"),
    "directory.parquet": (has_an_endless_directory, "too_large", "directory"),
    "deep.jsonl": (is_nested_deeply, "invalid_json", "recursion"),
    "cell.csv": (is_one_long_cell, "too_long", "16 MiB"),
    "row.json": (is_one_long_row, "too_long", "16 MiB"),
}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bombs")
    for name, (make, _, _) in BOMBS.items():
        make(folder / name)
    command = [sys.executable, "-c", LOOK, str(LIMIT), str(folder)]
    run = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found, peak = json.loads(run.stdout)
    assert peak < LIMIT
    return dict(found)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_memory(looked: dict[str, Any], name: str) -> None:
    _, code, words = BOMBS[name]
    assert looked[name][2] == code and words in looked[name][3], looked[name]


def test_a_reader_that_believes_the_file_runs_out_of_that_memory(looked: dict[str, Any]) -> None:
    assert looked["believed"] == "MemoryError"


# --- more than rows are worth --------------------------------------------------------------------------


def first_fault(path: Path) -> tuple[str, str]:
    fault = check_file(path).faults[0]
    return fault.code, fault.message


@pytest.mark.parametrize(("columns", "good"), [(4096, True), (4097, False)])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_columns_are_bounded(tmp_path: Path, kind: str, columns: int, good: bool) -> None:
    row: dict[str, Any] = {"text": "a"} | {f"c{at}": "b" for at in range(columns - 1)}
    path = tmp_path / "rows"
    match kind:
        case "jsonl":
            path.write_text(json.dumps(row) + "\n")
        case "json":
            path.write_text(json.dumps([row]))
        case "csv":
            path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
        case _:
            pq.write_table(pa.table({name: [cell] for name, cell in row.items()}), path)
    report = check_file(path)
    assert report.ok is good, report.faults
    assert good or "at most 4096 columns" in report.faults[0].message


def test_rows_that_repeat_one_another_take_a_share_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.array(["a"] * 100_000)}), path)
    assert check_file(path).rows == 100_000
    pq.write_table(pa.table({"text": pa.array(["a"] * 100_001)}), path)
    code, message = first_fault(path)
    assert code == "too_large" and "100001 rows" in message


def test_empty_columns_take_a_share_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 30
    pq.write_table(pa.table({"messages": pa.array([turns] * 10_000)}), path)
    code, message = first_fault(path)
    assert code == "too_large" and "values and more" in message


def test_types_of_parquet_nested_without_end_are_a_fault(tmp_path: Path) -> None:
    path, value, kind = tmp_path / "rows.parquet", "a", pa.string()
    for _ in range(70):
        value, kind = [value], pa.list_(kind)  # type: ignore[assignment]
    pq.write_table(pa.table({"text": pa.array([value], kind)}), path)
    assert first_fault(path)[0] in ("invalid_parquet", "unreadable_file")


@pytest.mark.parametrize("opening", [b"\x19", b"\x1c"], ids=["lists", "structs"])
def test_page_headers_nested_without_end_are_no_headers(tmp_path: Path, opening: bytes) -> None:
    path = texts(tmp_path / "rows.parquet", ["a" * 3000])
    raw = path.read_bytes()
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    path.write_bytes(raw[:start] + opening * 2000 + raw[start + 2000 :])
    code, message = first_fault(path)
    assert code == "unreadable_file" and "nested too deeply" in message


def test_a_string_cut_anywhere_is_one_string(tmp_path: Path) -> None:
    rows = [{"text": 'a "quoted" word, \\ and [brackets] {in} it \\'}, {"text": "b\\"}]
    raw = json.dumps(rows).encode()
    for size in range(1, 12):
        check = FileCheck()
        for at in range(0, len(raw), size):
            check.feed(raw[at : at + size])
        assert check.finish().rows == 2
        path = tmp_path / "rows.json"
        path.write_bytes(raw)
        reader = JsonArray()
        found = [
            json.loads(record.raw) for at in range(0, len(raw), size) for record in reader.feed(raw[at : at + size])
        ]
        assert found == rows, size
