"""Containers told apart by their bytes, read in constant memory, and every way in which they can be bad."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data import parallel
from core.data.check import FileCheck, FileReport, check_file
from core.data.containers import parquet
from core.data.fast import UsualLines
from core.data.rows import PromptCompletion
from core.data.stream import RowStream, content
from core.errors import DataError
from core.spec.axes.data import HashSplit
from core.spec.run.orders import DataFiles, DataOrder

PAIRS = [{"prompt": f"p{n}", "completion": f"c{n}"} for n in range(7)]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": 'a [b] {c}, "d" \\'}]}


def write(path: Path, rows: list[Any], kind: str) -> Path:
    match kind:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "json":
            path.write_text(json.dumps(rows, indent=1))
        case "data":
            path.write_text(json.dumps({"data": rows}))
        case "csv":
            lines = [",".join(rows[0])] + [",".join(str(cell) for cell in row.values()) for row in rows]
            path.write_text("\n".join(lines) + "\n")
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def check(path: Path, raw: bytes | str, **options: Any) -> FileReport:
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return check_file(path, **options)


def codes(report: FileReport) -> list[tuple[str, str | None]]:
    return [(fault.code, fault.field) for fault in report.faults]


@pytest.mark.parametrize("kind", ["jsonl", "json", "data", "csv", "parquet"])
def test_the_same_rows_in_every_container(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "rows.txt", PAIRS, kind)
    report = check_file(path)
    assert (report.rows, report.format, report.fault_count) == (7, "prompt_completion", 0)
    assert report.container == {"data": "json"}.get(kind, kind)
    stream = RowStream(DataOrder.of(path))
    found = list(stream.rows())
    assert [numbered.row for _, numbered in found] == [PromptCompletion(f"p{n}", f"c{n}") for n in range(7)]
    for at, (cursor, _) in enumerate(found):  # from every place on, by way of JSON
        rest = list(RowStream(DataOrder.of(path)).rows(json.loads(json.dumps(cursor))))
        assert rest == found[at + 1 :]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_chats_in_other_containers(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "rows", [CHAT] * 5, kind)
    assert check_file(path).as_dict() | {"notices": []} == {
        "container": kind,
        "rows": 5,
        "format": "messages",
        "columns": {},
        "ignored_columns": [],
        "fault_count": 0,
        "faults": [],
        "notices": [],
    }
    row = next(iter(RowStream(DataOrder.of(path)).rows()))[1].row
    assert row.messages[1].content == CHAT["messages"][1]["content"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("raw", "code", "field"),
    [
        (b"", "empty_file", None),
        (b"[]", "empty_file", None),
        (b"prompt,completion\n", "empty_file", None),
        (b"\xef\xbb\xbf\n", "empty_file", None),
        (b'[{"text": "a"}', "invalid_json", "row 1"),
        (b'[{"text": "a"},]', "invalid_json", "row 2"),
        (b'[{"text": "a"} {"text": "b"}]', "invalid_json", "row 1"),
        (b'[{"text": "a"}] trailing', "invalid_json", "row 2"),
        (b'{"data": [{"text": "a"}]', "invalid_json", "row 2"),
        (b'[{"text": "a"}, 3]', "invalid_row", "row 2"),
        (b'[{"text": "a"}, {"text": "b", "text": "c"}]', "invalid_json", "row 2"),
        (b'[{"text": "a"}, {"text": null}]', "invalid_type", "row 2: text"),
        (b'prompt,completion\n"a,b\n', "invalid_csv", "line 2"),
        (b'prompt,completion\na "quoted" word,b\n', "invalid_csv", "line 2"),
        (b"prompt,completion\na,b,c\n", "invalid_csv", "line 2"),
        (b"prompt,completion\na,\n", "empty", "line 2: completion"),
        (b"prompt,completion\na,b\n\nc,d\n", "blank_line", "line 3"),
        (b"prompt,prompt\na,b\n", "invalid_csv", "line 1"),
        (b"prompt,completion\na,\xff\n", "invalid_utf8", "line 2"),
        (b"prompt,completion\na,b\x00\n", "invalid_csv", "line 2"),
        (b"prompt;completion\na;b\n", "invalid_csv", None),
        (b"prompt\tcompletion\na\tb\n", "invalid_csv", None),
        (b"messages,id\nhello,3\n", "invalid_json", "line 2"),
        ('{"text": "a"}\n'.encode("utf-16"), "invalid_utf8", None),
        ('{"text": "a"}\n'.encode("utf-16-le"), "invalid_utf8", None),
        (b"question,answer\na,b\n", "unknown_format", None),
        (b"Hello, world: 3 cheers\nfoo\n", "invalid_json", "lines 1 to 2"),
        (b"prompt,completion\ra,b\r", "unreadable_file", None),
        (b'{"text": "a"}\r{"text": "b"}\r', "unreadable_file", None),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", "invalid_json", "line 1"),
        (b"\x1f\x8b\x08\x00 packed", "unreadable_file", None),
        (b"PK\x03\x04 packed", "unreadable_file", None),
        (b"PAR1 broken", "unreadable_file", None),
        (b'{"text": "a"}\n{"text": "b\x00"}\n', "invalid_json", "line 2"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "invalid_utf8", "line 2"),
    ],
)
def test_a_bad_file_is_named_by_its_place(tmp_path: Path, raw: bytes, code: str, field: str | None) -> None:
    assert codes(check(tmp_path / "bad", raw))[0] == (code, field)


def test_a_byte_order_mark_is_forgiven(tmp_path: Path) -> None:
    for raw in ('{"text": "a"}\n', '[{"text": "a"}]', "text\na\n"):
        report = check(tmp_path / "bom", b"\xef\xbb\xbf" + raw.encode())
        assert (report.rows, report.fault_count) == (1, 0), raw
        (_, numbered) = next(iter(RowStream(DataOrder.of(tmp_path / "bom")).rows()))
        assert numbered.row.text == "a"  # type: ignore[union-attr]


def test_csv_cells_stay_text_and_formulas_are_told(tmp_path: Path) -> None:
    raw = 'prompt,completion\n"=HYPERLINK(""http://x"",""y"")",@SUM(A1)\n-5,+1\n"+cmd|\' /C calc\'!A0","two\nlines"\n'
    report = check(tmp_path / "tricks.csv", raw)
    assert (report.rows, report.fault_count) == (3, 0)
    notice, pairs = report.notices
    assert pairs.code == "pairs" and "data.rendering.pairs" in pairs.message
    assert (notice.code, notice.line) == ("formula", 2) and "3x" in notice.message
    found = [numbered.row for _, numbered in RowStream(DataOrder.of(tmp_path / "tricks.csv")).rows()]
    assert found == [
        PromptCompletion('=HYPERLINK("http://x","y")', "@SUM(A1)"),
        PromptCompletion("-5", "+1"),
        PromptCompletion("+cmd|' /C calc'!A0", "two\nlines"),
    ]


def test_a_line_of_100_mb_is_a_fault_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "a"}\n{"text": "')
        for _ in range(100):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "b"}\n')
    tracemalloc.start()
    report = check_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (codes(report), report.rows) == ([("too_long", "line 2")], 2)
    assert peak < 64 << 20


def test_a_parquet_bomb_is_refused_before_it_swells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["x" * (8 << 20)] * 4}), path, use_dictionary=False, compression="zstd")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 16 << 20)
    report = check_file(path)
    assert path.stat().st_size < 1 << 20
    assert (report.rows, report.faults[0].code) == (0, "too_large")


def test_a_parquet_dictionary_bomb_is_read_one_row_at_a_time(tmp_path: Path) -> None:
    """One string of 4 MiB that 2,000 rows name: 8 GiB as rows, 4 MiB as it is."""
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (4 << 20)]))
    pq.write_table(pa.table({"text": text}), path, dictionary_pagesize_limit=64 << 20)
    before = pa.total_allocated_bytes()
    seen = 0
    for _, numbered in RowStream(DataOrder.of(path)).rows():
        seen = max(seen, pa.total_allocated_bytes() - before)
        if numbered.line == 300:
            break
    assert seen < 256 << 20


def test_parquet_nulls_are_absent_and_structs_of_arguments_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"prompt": ["a", "b"], "completion": ["c", None], "text": pa.array([None, None], "string")}), path
    )
    assert codes(check_file(path)) == [("missing_field", "row 2: completion")]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
    pq.write_table(pa.Table.from_pylist([chat]), path)
    assert check_file(path).faults[0].code == "unsupported_field"
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    assert check_file(path).faults[0].code == "unknown_format"


# --- the fast way and the exact one ------------------------------------------------------------------


UNUSUAL = [
    b'{"prompt": "a", "completion": "b", "completion": "c"}',
    b'{"prompt": "a", "c\\u006fmpletion": "b", "completion": "c"}',
    b'{"prompt": "a", "completion" : "b", "completion": "c"}',
    b'{"prompt": "a", "completion": " "}',
    b'{"prompt": "a", "completion": "b", "text": "c"}',
    b'{"prompt": "a", "completion": "\xff"}',
    b'{"prompt": "a", "completion": "\\ud800"}',
    b'{"prompt": "a", "completion": "\\u0000"}',
    b'{"prompt": "a", "completion": 3}',
    b'{"prompt": "a", "completion": "b", "n": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "completion": "b", "n": 1e999}',
    b'{"prompt": "a"}',
    b'{"prompt": "a", "completion": "b"} {"prompt": "a", "completion": "b"}',
    b"",
    b'["prompt"]',
    b'{"prompt": "a", "completion": "b",}',
    b'{"prompt": "a", "completion": "b\tc"}',
]


@pytest.mark.parametrize("line", UNUSUAL)
def test_the_fast_way_passes_nothing_that_the_exact_one_refuses(line: bytes) -> None:
    good = b'{"prompt": "a \\": b : c", "completion": "caf\\u00e9 \xc3\xa9"}\n'
    usual = UsualLines("prompt_completion", {}, {"prompt": "a", "completion": "b"})
    assert usual.rows(good * 3) == (3, frozenset())
    assert usual.rows(good + line + b"\n" + good) is None
    checker = FileCheck()
    checker.feed(good * 5000)  # by blocks
    checker.feed(line + b"\n" + good)
    report = checker.finish()
    assert report.fault_count == 1 and report.faults[0].line == 5001
    assert report.rows == 5001


def test_a_value_across_lines_is_not_two_rows() -> None:
    usual = UsualLines("prompt_completion", {}, {"prompt": "a", "completion": "b"})
    assert usual.rows(b'{"prompt": "a",\n"completion": "b"}\n') is None
    assert usual.rows(b'{"prompt": "a", "completion": "b"} {"prompt": "a", "completion": "b"}\n\n') is None


def test_several_processes_report_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        for n in range(60_000):
            stream.write(b'{"prompt": "p%d", "completion": "%s"}\n' % (n, b"x" * (n % 90 + 1)))
            if n in (9_999, 40_000):
                stream.write(b'{"prompt": "p", "completion": ""}\n')
        stream.write(b'{"prompt": "%s", "completion": "b"}\n' % (b"long" * 100_000))
        stream.write(b"\n\n")
    one = check_file(path)
    assert (one.rows, [fault.field for fault in one.faults]) == (60_001, ["lines 10001 and 40003: completion"])
    monkeypatch.setattr(parallel, "WORTH_BYTES", 0)
    monkeypatch.setattr(parallel, "STRETCH_BYTES", 1 << 20)
    monkeypatch.setattr(parallel, "processes", lambda: 2)
    assert check_file(path) == one


# --- mixtures and splits -----------------------------------------------------------------------------


def texts(folder: Path, name: str, count: int) -> str:
    return str(write(folder / name, [{"text": f"{name}{n}"} for n in range(count)], "jsonl"))


def words(order: DataOrder) -> list[str]:
    return [numbered.row.text for _, numbered in RowStream(order).rows()]  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_mixture_draws_by_weight_and_goes_on_from_any_row(tmp_path: Path, stop: Any) -> None:
    sources = [
        DataFiles(paths=[texts(tmp_path, "a", 30), texts(tmp_path, "b", 10)], weight=3.0),
        DataFiles(paths=[texts(tmp_path, "c", 25)], weight=1.0),
    ]
    order = DataOrder(sources=sources, stopping_strategy=stop, seed=5)
    whole = list(RowStream(order).rows())
    found = [numbered.row.text for _, numbered in whole]  # type: ignore[union-attr]
    assert found == words(order)
    assert words(order.model_copy(update={"seed": 6})) != found
    share = sum(text[0] == "c" for text in found) / len(found)
    assert 0.1 < share < 0.45
    if stop == "all_exhausted":
        assert set(found) == {f"a{n}" for n in range(30)} | {f"b{n}" for n in range(10)} | {f"c{n}" for n in range(25)}
        assert len(found) > 65  # the smaller share needed another pass over the larger one
    else:
        assert len(set(found)) == len(found)
    for at in (*range(0, len(whole), 7), len(whole) - 1):  # behind the last one, nothing is left of the pass
        rest = list(RowStream(order).rows(json.loads(json.dumps(whole[at][0]))))
        assert rest == whole[at + 1 :]


def test_weights_that_are_far_apart_do_not_fill_the_disk(tmp_path: Path) -> None:
    sources = [
        DataFiles(paths=[texts(tmp_path, "a", 1)], weight=1e6, field="data.train.sources[0]"),
        DataFiles(paths=[texts(tmp_path, "b", 5)], weight=1e-6, field="data.train.sources[1]"),
    ]
    with pytest.raises(DataError, match="weights are so far apart") as refused:
        words(DataOrder(sources=sources))
    assert refused.value.field == "data.train.sources[0]"


def test_without_weights_every_row_is_there_once(tmp_path: Path) -> None:
    order = DataOrder(sources=[DataFiles(paths=[texts(tmp_path, name, 3)]) for name in "ab"])
    assert words(order) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_split_depends_on_what_a_row_says_alone(tmp_path: Path) -> None:
    split = HashSplit(eval_fraction=0.25)
    path = write(tmp_path / "rows", [{"text": f"t{n}"} for n in range(400)], "jsonl")

    def side(part: Any, source: Path = path) -> list[str]:
        return words(DataOrder.of(source).model_copy(update={"split": split, "part": part}))

    train, held = side("train"), side("eval")
    assert sorted(train + held) == sorted(f"t{n}" for n in range(400))
    assert 60 < len(held) < 140
    backwards = write(tmp_path / "back", [{"id": n, "text": f"t{n}"} for n in reversed(range(400))], "parquet")
    assert set(side("eval", backwards)) == set(held)
    other = DataOrder.of(path).model_copy(update={"split": HashSplit(eval_fraction=0.25, seed=1), "part": "eval"})
    assert words(other) != held
    few = write(tmp_path / "few", [{"text": "t0"}], "jsonl")
    empty = "eval" if content(next(iter(RowStream(DataOrder.of(few)).rows()))[1].row) and "t0" in train else "train"
    with pytest.raises(DataError, match="eval_fraction"):
        side(empty, few)


def test_a_faulty_row_ends_a_stream_and_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    rows = RowStream(DataOrder.of(path)).rows()
    assert next(rows)[1].line == 1
    with pytest.raises(DataError, match="line 2: text"):
        next(rows)
    path.write_bytes(b"\x1f\x8b\x08\x00 packed")
    with pytest.raises(DataError, match=r"^rows: the file is packed with gzip"):
        next(RowStream(DataOrder.of(path)).rows())
