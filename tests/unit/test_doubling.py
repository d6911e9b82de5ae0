"""Work grows with the input and not faster: for every parser that reads what somebody sent, twice the input costs at
most 2.5 times the processor time. A reader that looks at the same bytes again and again would cost four times as much.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from api.files.form import UploadForm
from core.data.check import FileCheck
from core.data.containers.parquet_pages import BadPage, pages
from core.data.decode import decode
from core.errors import EftError
from core.plan.models.headers import read_header
from core.spec.axes.data import Readable
from core.spec.load import MAX_YAML_BYTES, load_json, load_yaml, parse_job

MOST_TIMES = 2.5
ENOUGH_SECONDS = 0.015
"""Processor time below which nothing is measured: the input is made larger instead."""
TRIES = 5
CHUNK = 64 << 10

Work = Callable[[], object]
Case = Callable[[int, Path], Work]
"""From a size to the work on an input of that size."""


def check(data: bytes, chunk: int = CHUNK, **options: Any) -> Work:
    """A file as an upload has it checked: by chunks, to its end."""

    def work() -> object:
        checker = FileCheck(**options)
        for at in range(0, len(data), chunk):
            checker.feed(data[at : at + chunk])
        return checker.finish()

    return work


def check_parquet(path: Path) -> Work:
    def work() -> object:
        checker = FileCheck()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                checker.feed(chunk)
        return checker.finish(path)

    return work


def refused(work: Work) -> Work:
    """Work that ends with an error of ours, or none."""

    def run() -> object:
        try:
            return work()
        except (EftError, ValueError, RecursionError):
            return None

    return run


def rows(value: dict[str, Any], n: int) -> bytes:
    return (json.dumps(value).encode() + b"\n") * n


def array(value: dict[str, Any], n: int) -> bytes:
    return b"[" + b",".join([json.dumps(value).encode()] * n) + b"]"


# --- containers ----------------------------------------------------------------------------------------


def jsonl_usual_lines(n: int, _: Path) -> Work:
    return check(rows({"prompt": "lamp on", "completion": "lamp.on"}, 200 * n))


def jsonl_unusual_lines(n: int, _: Path) -> Work:
    return check(rows({"prompt": "lamp on", "completion": "lamp.on"}, 40 * n).replace(b'":', b'" :'))


def jsonl_faults(n: int, _: Path) -> Work:
    return check(b"{}\n" * (40 * n))


def jsonl_one_line(n: int, _: Path) -> Work:
    return check(rows({"text": "é" * (3000 * n)}, 1))


def jsonl_one_line_in_small_pieces(n: int, _: Path) -> Work:
    return check(rows({"text": "x" * (1000 * n)}, 1), chunk=40)


def jsonl_blank_lines(n: int, _: Path) -> Work:
    return check(b'{"text": "a"}\n' + b"\n" * (1000 * n))


def json_rows(n: int, _: Path) -> Work:
    return check(array({"prompt": "lamp on", "completion": "lamp.on"}, 30 * n))


def json_one_row_of_one_string(n: int, _: Path) -> Work:
    return check(array({"text": "x" * (40_000 * n)}, 1))


def json_one_row_of_one_escaped_string(n: int, _: Path) -> Work:
    return check(b'[{"text": "' + b"\\n" * (10_000 * n) + b'"}]')


def json_one_string_in_small_pieces(n: int, _: Path) -> Work:
    return check(array({"text": "x" * (1000 * n)}, 1), chunk=40)


def json_one_row_of_many_keys(n: int, _: Path) -> Work:
    return check(array({"text": "a", **{f"k{at}": at for at in range(100 * n)}}, 1))


def json_space_before_rows(n: int, _: Path) -> Work:
    return check(b"[" + b" " * (10_000 * n) + b'{"text": "a"}]' + b" " * (10_000 * n))


def json_empty_rows(n: int, _: Path) -> Work:
    return check(b"[" + b"," * (100 * n) + b"]")


def csv_rows(n: int, _: Path) -> Work:
    return check(b"prompt,completion\n" + b'lamp,"on, ""please"""\n' * (40 * n))


def csv_open_quote(n: int, _: Path) -> Work:
    return check(b'prompt,completion\n"a' + b"\n" * (100 * n) + b'",b\n')


def csv_quote_never_closed(n: int, _: Path) -> Work:
    return check(b'prompt,completion\n"a' + b"b\n" * (100 * n))


def csv_doubled_quotes_in_lines(n: int, _: Path) -> Work:
    return check(b'prompt,completion\n"a' + b'""\n' * (100 * n) + b'",b\n')


def csv_one_cell(n: int, _: Path) -> Work:
    return check(b'prompt,completion\na,"' + b'""' * (5000 * n) + b'"\n')


def csv_one_cell_in_small_pieces(n: int, _: Path) -> Work:
    return check(b"prompt,completion\na," + b"x" * (1000 * n) + b"\n", chunk=40)


def csv_columns(n: int, _: Path) -> Work:
    names = [f"c{at}" for at in range(50 * n)]
    return check(("prompt,completion," + ",".join(names) + "\n" + "a,b," + ",".join("1" * len(names)) + "\n").encode())


def csv_cells_without_columns(n: int, _: Path) -> Work:
    return check(b"prompt,completion\n" + b"a," * (1000 * n) + b"b\n")


def csv_blank_lines(n: int, _: Path) -> Work:
    return check(b"prompt,completion\n" + b"\n" * (100 * n))


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Work:
    pq.write_table(pa.table(columns), path, **options)
    return check_parquet(path)


def parquet_rows(n: int, folder: Path) -> Work:
    texts = [f"{at} " + "lamp " * 3 for at in range(30 * n)]
    return parquet(folder / f"{n}", {"prompt": texts, "completion": texts}, use_dictionary=False)


def parquet_dictionary(n: int, folder: Path) -> Work:
    """Each row names another text of a dictionary that has as many as there are rows."""
    texts = [f"{at} " + "lamp " * 8 for at in range(60 * n)]
    return parquet(folder / f"{n}", {"text": texts}, dictionary_pagesize_limit=64 << 20)


def parquet_repeated_rows(n: int, folder: Path) -> Work:
    return parquet(folder / f"{n}", {"text": ["lamp"] * (60 * n)})


def parquet_columns(n: int, folder: Path) -> Work:
    return parquet(folder / f"{n}", {"text": ["a"], **{f"c{at}": [at] for at in range(20 * n)}})


def parquet_row_groups(n: int, folder: Path) -> Work:
    return parquet(folder / f"{n}", {"text": ["a"] * n}, row_group_size=1)


def parquet_one_list(n: int, folder: Path) -> Work:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * (10 * n)
    return parquet(folder / f"{n}", {"messages": [turns]})


def read_pages(data: bytes, path: Path, values: int) -> Work:
    path.write_bytes(data)

    def work() -> object:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return sum(1 for _ in pages(descriptor, 0, len(data), values))
        except BadPage:
            return None
        finally:
            os.close(descriptor)

    return work


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def page_header_of_nested_lists(n: int, folder: Path) -> Work:
    return read_pages(b"\x19" + b"\x19" * (1000 * n), folder / f"{n}", 1)


def page_header_of_nested_structs(n: int, folder: Path) -> Work:
    return read_pages(b"\x1c" * (1000 * n), folder / f"{n}", 1)


def page_header_of_one_list(n: int, folder: Path) -> Work:
    count = 500 * n
    return read_pages(b"\x19" + bytes([0xF1]) + varint(count) + b"\1" * count + b"\0" * 9, folder / f"{n}", 1)


def many_page_headers(n: int, folder: Path) -> Work:
    # type 0; sizes 0 and 0; a data page of one value of encoding 0
    header = b"\x15\x00\x15\x00\x15\x00" + b"\x2c" + b"\x15\x02\x15\x00\x00" + b"\x00"
    return read_pages(header * (30 * n), folder / f"{n}", 30 * n)


# --- what stands in a row ------------------------------------------------------------------------------

TURN = {"role": "user", "content": "lamp on"}
ANSWER = {"role": "assistant", "content": "lamp.on"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMATS: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": lambda n: {"messages": [TURN, ANSWER] * n},
    "messages_of_parts": lambda n: {"messages": [{**TURN, "content": [{"type": "text", "text": "a"}] * n}, ANSWER]},
    "messages_with_calls": lambda n: {
        "messages": [
            TURN,
            {"role": "assistant", "tool_calls": [{**CALL, "id": f"c{at}"} for at in range(n)]},
            *({"role": "tool", "content": "1", "tool_call_id": f"c{at}"} for at in range(n)),
            ANSWER,
        ],
        "tools": [TOOL] * n,
    },
    "messages_with_unknown_keys": lambda n: {"messages": [TURN, {**ANSWER, **{f"k{at}": 1 for at in range(n)}}]},
    "tools_as_text": lambda n: {"messages": [TURN, ANSWER], "tools": json.dumps([TOOL] * n)},
    "sharegpt": lambda n: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * n},
    "sharegpt_calls": lambda n: {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": json.dumps([{"name": "f", "arguments": {}}] * n)},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b"},
        ]
    },
    "prompt_completion": lambda n: {"prompt": [TURN, ANSWER] * n + [TURN], "completion": [ANSWER]},
    "instruction": lambda n: {"instruction": "lamp " * (500 * n), "input": "é" * (500 * n), "output": "on"},
    "text": lambda n: {"text": "é\0" * (500 * n)},
    "preference": lambda n: {"chosen": [TURN, ANSWER] * n, "rejected": [TURN, ANSWER] * n},
    "preference_texts": lambda n: {"chosen": "a b " * (500 * n) + "c", "rejected": "a b " * (500 * n) + "d"},
    "preference_one_word": lambda n: {"chosen": "a" * (900 * n) + "c", "rejected": "a" * (900 * n) + "d"},
    "kto": lambda n: {"messages": [TURN, ANSWER] * n, "label": True},
    "stepwise": lambda n: {"prompt": [TURN, ANSWER] * n + [TURN], "completions": ["a"] * n, "labels": [True] * n},
    "prompt": lambda n: {"prompt": [TURN, ANSWER] * n + [TURN], "reference": "a", **{f"k{at}": 1 for at in range(n)}},
}  # fmt: skip


def row_of(name: str) -> Case:
    return lambda n, _: check(array(FORMATS[name](10 * n), 1))


def mapped_columns(n: int, _: Path) -> Work:
    columns = {"prompt": "a", "completion": "b", "input": "c", "output": "d", "instruction": "e", "text": "f"}
    row = {"a": "1", "b": "2", **{f"k{at}": 1 for at in range(40 * n)}}
    return check(array(row, 1), columns={name: columns[name] for name in ("prompt", "completion")})


def json_long_number(n: int, _: Path) -> Work:
    return refused(lambda text="1" * (20_000 * n): decode(text))


def json_long_fraction(n: int, _: Path) -> Work:
    return refused(lambda text="0." + "3" * (20_000 * n): decode(text))


def json_nested(n: int, _: Path) -> Work:
    return refused(lambda text="[" * (1000 * n) + "]" * (1000 * n): decode(text))


def json_lists_in_a_list(n: int, _: Path) -> Work:
    return lambda text="[" + ",".join(["[]"] * (2000 * n)) + "]": decode(text)


def json_doubled_keys(n: int, _: Path) -> Work:
    return refused(lambda text="{" + ",".join(f'"k{at // 2}":1' for at in range(300 * n)) + "}": decode(text))


# --- requests and jobs ---------------------------------------------------------------------------------


def column_mapping(n: int, _: Path) -> Work:
    text = json.dumps({"columns": {f"c{at}": "x" for at in range(50 * n)}})
    return refused(lambda: Readable.model_validate_json(text))


def form_of(body: bytes) -> Work:
    def work() -> object:
        form = UploadForm(
            "multipart/form-data; boundary=bound",
            on_field=lambda name, value: None,
            on_file=lambda name: None,
            on_data=lambda data: None,
        )
        for at in range(0, len(body), CHUNK):
            form.feed(body[at : at + CHUNK])
        return form.finish()

    return refused(work)


FILE_PART = b'--bound\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'


def form_with_a_file(n: int, _: Path) -> Work:
    return form_of(FILE_PART + b"\r\n" + b"\r\n--boun" * (500 * n) + b"\r\n--bound--\r\n")


def form_with_many_headers(n: int, _: Path) -> Work:
    return form_of(FILE_PART + b"X: y\r\n" * (300 * n) + b"\r\nabc\r\n--bound--\r\n")


def form_with_one_long_header(n: int, _: Path) -> Work:
    name = b'--bound\r\nContent-Disposition: form-data; name="file"; filename="' + b'\\"' * (1000 * n) + b'"\r\n\r\n'
    return form_of(name + b"abc\r\n--bound--\r\n")


JOB: dict[str, Any] = {"model": "a/b", "data": "file-01kar3v8x5m2h6n9qst4wyz0bc"}


def spec(document: dict[str, Any]) -> Work:
    text = json.dumps(document).encode()
    return refused(lambda: parse_job(load_json(text)))


def spec_with_unknown_fields(n: int, _: Path) -> Work:
    return spec(JOB | {f"k{at}": 1 for at in range(30 * n)})


def spec_with_one_long_field(n: int, _: Path) -> Work:
    return spec(JOB | {"k" * (20_000 * n): 1})


def spec_with_one_long_value(n: int, _: Path) -> Work:
    return spec(JOB | {"name": "k" * (20_000 * n), "stage": "s" * (20_000 * n)})


def spec_with_many_sources(n: int, _: Path) -> Work:
    return spec(JOB | {"data": {"train": [{"type": "file", "id": JOB["data"]}] * (20 * n)}})


def spec_nested(n: int, _: Path) -> Work:
    return refused(lambda text=b"[" * (1000 * n) + b"]" * (1000 * n): load_json(text))


def yaml_of(text: bytes) -> Work:
    return refused(lambda: load_yaml(text[:MAX_YAML_BYTES]))


def yaml_fields(n: int, _: Path) -> Work:
    return yaml_of("".join(f"k{at}: 1\n" for at in range(10 * n)).encode())


def yaml_list(n: int, _: Path) -> Work:
    return yaml_of(b"a: [" + b"1, " * (10 * n) + b"1]")


def yaml_nested(n: int, _: Path) -> Work:
    """Each is looked at again for as long as it may still be a key: 1,024 characters."""
    return yaml_of(b"a: " + b"[" * (500 * n))


def yaml_one_text(n: int, _: Path) -> Work:
    return yaml_of(b'a: "' + b"\\n\n" * (50 * n) + b'"')


def yaml_base_60(n: int, _: Path) -> Work:
    """A whole number of many digits to the base 60, which YAML 1.1 has."""
    return yaml_of(b"a: 1" + b":1" * (100 * n))


def yaml_long_number(n: int, _: Path) -> Work:
    return yaml_of(b"a: " + b"1_" * (200 * n) + b"e")


def safetensors_header(n: int, folder: Path) -> Work:
    header = {f"t{at}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at in range(30 * n)}
    raw = json.dumps(header).encode()
    path = folder / f"{n}.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * (4 * 30 * n))
    return lambda: read_header(path, field="model")


CASES: dict[str, Case] = {
    **{
        case.__name__: case
        for case in (
            *(jsonl_usual_lines, jsonl_unusual_lines, jsonl_faults, jsonl_one_line, jsonl_one_line_in_small_pieces),
            *(jsonl_blank_lines, json_rows, json_one_row_of_one_string, json_one_row_of_one_escaped_string),
            *(json_one_string_in_small_pieces, json_one_row_of_many_keys, json_space_before_rows, json_empty_rows),
            *(csv_rows, csv_open_quote, csv_quote_never_closed, csv_doubled_quotes_in_lines, csv_one_cell),
            *(csv_one_cell_in_small_pieces, csv_columns, csv_cells_without_columns, csv_blank_lines),
            *(parquet_rows, parquet_dictionary, parquet_repeated_rows, parquet_columns, parquet_row_groups),
            *(parquet_one_list, page_header_of_nested_lists, page_header_of_nested_structs, page_header_of_one_list),
            many_page_headers,
            *(mapped_columns, json_long_number, json_long_fraction, json_nested, json_lists_in_a_list),
            *(json_doubled_keys, column_mapping, form_with_a_file, form_with_many_headers, form_with_one_long_header),
            *(spec_with_unknown_fields, spec_with_one_long_field, spec_with_one_long_value, spec_with_many_sources),
            *(spec_nested, yaml_fields, yaml_list, yaml_nested, yaml_one_text, yaml_base_60, yaml_long_number),
            safetensors_header,
        )
    },
    **{f"row_of_{name}": row_of(name) for name in FORMATS},
}


def seconds(work: Work, runs: int) -> float:
    """Processor time of the best of so many runs."""
    best = float("inf")
    gc.disable()  # how long it takes depends on all that the process of the tests holds
    for _ in range(runs):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    gc.enable()
    return best


def grown(case: Case, folder: Path) -> tuple[int, float]:
    """A size whose work can be measured, and what it takes. 512: what bounds the input makes it too cheap."""
    n = 8
    while (took := seconds(case(n, folder), 1)) < ENOUGH_SECONDS and n < 512:
        n *= 2
    return n, took


@pytest.mark.parametrize("name", CASES)
def test_twice_the_input_costs_no_more_than_twice_the_time(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    n, took = grown(case, tmp_path)
    runs = 1 if took > 10 * ENOUGH_SECONDS else 2
    found = []
    for size in (n, 2 * n, 4 * n):  # where one input fits a cache and the next does not; the square of it shows at each
        once, twice = case(size, tmp_path), case(2 * size, tmp_path)
        before = after = float("inf")
        for _ in range(TRIES):  # other work on the machine makes a run slower, never quicker
            before, after = min(before, seconds(once, runs)), min(after, seconds(twice, runs))
            if after <= MOST_TIMES * max(before, ENOUGH_SECONDS / 2):
                return
        found.append(f"{after / before:.1f} times at {size}")
    raise AssertionError(f"{name}: twice the input takes so much more processor time: {', '.join(found)}")
