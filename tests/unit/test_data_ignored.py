"""Columns that are not trained on are told, and a label beside a text is asked about."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data.check import FileReport, check_file
from core.data.ignored import glance
from core.spec.run.orders import DataFiles, DataOrder

ASKED = (
    "`columns: {prompt: text, completion: intent}`, or `--column prompt=text --column completion=intent` on the "
    "command line"
)


def checked(path: Path, data: bytes | str, **options: object) -> FileReport:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return check_file(path, **options)  # type: ignore[arg-type]


def codes(report: FileReport) -> list[str]:
    return [notice.code for notice in report.notices]


def parquet(rows: dict[str, list[object]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(rows), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        "text,intent\nlights on,lights.on\nlights off,lights.off\n",
        '{"text": "lights on", "intent": "lights.on"}\n' * 5000,
        json.dumps([{"text": "lights on", "intent": "lights.on"}]),
        parquet({"text": ["lights on"], "intent": ["lights.on"]}),
    ],
    ids=["csv", "jsonl", "json", "parquet"],
)
def test_a_label_beside_a_text_is_asked_about(tmp_path: Path, data: bytes | str) -> None:
    report = checked(tmp_path / "rows", data)
    assert report.ok and report.format == "text" and report.ignored_columns == ("intent",)
    assert codes(report) == ["label_ignored", "columns_ignored"]
    assert ASKED in report.notices[0].message
    mapping = {"prompt": "text", "completion": "intent"}
    mapped = checked(tmp_path / "rows", data, columns=mapping)
    assert mapped.ok and mapped.format == "prompt_completion"
    assert mapped.ignored_columns == () and codes(mapped) == ["pairs"]


def test_a_label_that_is_no_text_is_told_so(tmp_path: Path) -> None:
    report = checked(tmp_path / "rows", '{"text": "lights on", "label": 3}\n')
    assert report.notices[0].message.endswith("write the values of `label` as text first")


def test_what_is_about_a_text_is_listed_and_not_asked_about(tmp_path: Path) -> None:
    report = checked(tmp_path / "rows", '{"id": 1, "text": "a", "url": "x"}\n{"text": "b", "source": null}\n')
    assert report.ignored_columns == ("id", "url", "source") and codes(report) == ["columns_ignored"]
    assert "`id`, `url`, `source`" in report.notices[0].message
    two = checked(tmp_path / "rows", "text,kind\na,b\n")
    assert codes(two) == ["label_ignored", "columns_ignored"]  # the only other column: asked about, whatever its name


def test_columns_of_other_formats_and_names_that_are_taken_count(tmp_path: Path) -> None:
    chats = json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "S"}
    )
    assert checked(tmp_path / "rows", chats).ignored_columns == ("system",)
    taken = checked(
        tmp_path / "rows",
        '{"prompt": "lost", "question": "a", "completion": "b"}\n',
        columns={"prompt": "question", "completion": "completion"},
    )
    assert taken.ignored_columns == ("prompt",)
    reward = checked(tmp_path / "rows", '{"prompt": "a", "reference": "b", "level": 3}\n')
    assert reward.format == "prompt" and reward.ignored_columns == () and reward.notices == ()


def test_a_table_of_many_columns_is_told_in_few_words(tmp_path: Path) -> None:
    row = {"text": "a"} | {f"column{at}": at for at in range(300)}
    report = checked(tmp_path / "rows", json.dumps(row))
    assert len(report.ignored_columns) == 100
    assert report.notices[0].message.endswith("`column19` and 280 more")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "reference": "b"},
    ],
)
def test_tools_beside_plain_text_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    report = checked(tmp_path / "rows", json.dumps(row | {"tools": tools}))
    assert [(fault.code, fault.field) for fault in report.faults] == [("unsupported_field", "line 1: tools")]


def test_fields_that_a_template_may_not_have_are_told(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a", "name": "Bob"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
    ]
    row = {"messages": turns, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (notice,) = checked(tmp_path / "rows", json.dumps(row)).notices
    assert notice.code == "template_fields"
    assert "`name`, `tool_calls`, `reasoning`, `tools`" in notice.message


def test_two_transcripts_without_a_prompt_are_told_what_is_made_of_them(tmp_path: Path) -> None:
    report = checked(tmp_path / "rows", '{"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}\n')
    assert report.ok and codes(report) == ["implicit_prompt"]
    assert "set `data.rendering.pairs` of the job to `apart`" in report.notices[0].message
    report = checked(tmp_path / "rows", '{"chosen": "I see.", "rejected": "You see."}\n')
    assert "put the question into `prompt`" in report.faults[0].message


def test_the_trainer_tells_what_the_check_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    report = checked(path, "text,intent\nlights on,lights.on\n")
    order = DataOrder(sources=[DataFiles(paths=[str(path)], field="data.train")])
    assert glance(order) == list(report.notices)
