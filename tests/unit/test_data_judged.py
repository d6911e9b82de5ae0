"""Rows that judge answers or steps: the forms of TRL's dataset formats, and every way that they can be wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data import parallel
from core.data.check import FileReport, check_file
from core.data.checker import RowChecker
from core.data.fast import UsualLines
from core.data.faults import Faults
from core.data.rows import Message, Preference, Row, Stepwise

ASK, SAY, NO = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
Q, A, B = Message("user", "q"), Message("assistant", "a"), Message("assistant", "b")
STEPS = {"prompt": "9.8 or 9.11?", "completions": ["0.8 is 0.80.", "0.80 < 0.11."], "labels": [True, False]}


def read(value: Any, declared: Any = "auto") -> Row:
    found = Faults()
    row = RowChecker(declared, {}, found).row(1, value)
    assert row is not None, found.kept
    return row


def checked(tmp_path: Path, *rows: Any, **options: Any) -> FileReport:
    path = tmp_path / "rows"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return check_file(path, **options)


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, Preference("q", "a", "b")),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}, Preference((Q,), (A,), (B,))),
        ({"prompt": [ASK], "chosen": SAY, "rejected": "b"}, Preference((Q,), (A,), (B,))),
        ({"chosen": [ASK, SAY], "rejected": [ASK, NO]}, Preference((Q,), (A,), (B,))),
        ({"prompt": "q", "chosen": [ASK, SAY], "rejected": [ASK, NO]}, Preference((Q,), (A,), (B,))),
        ({"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, NO]}, Preference((Q,), (A,), (B,))),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is black."},
            Preference("The sky is", " blue.", " black."),
        ),
        ({"chosen": "Q: x\n\nA: yes", "rejected": "Q: x\n\nA: yes no"}, Preference("Q: x\n\nA:", " yes", " yes no")),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2}, Preference("q", "a", "b", margin=2.0)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": None}, Preference("q", "a", "b")),
        (STEPS, Stepwise("9.8 or 9.11?", ("0.8 is 0.80.", "0.80 < 0.11."), (True, False))),
        ({**STEPS, "prompt": [ASK]}, Stepwise((Q,), ("0.8 is 0.80.", "0.80 < 0.11."), (True, False))),
    ],
)
def test_forms(value: dict[str, Any], row: Row) -> None:
    assert read(value) == row


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("bad", "code", "field", "words"),
    [
        ({**PAIR, "rejected": "a"}, "nothing_to_learn", "line 2: rejected", "remove the row"),
        ({**PAIR, "margin": "2"}, "invalid_type", "line 2: margin", "is a number, not a string"),
        ({**PAIR, "margin": True}, "invalid_type", "line 2: margin", "not a boolean"),
        ({**PAIR, "margin": 1e7}, "invalid_value", "line 2: margin", "1e+06"),
        ({"chosen": "yes", "rejected": "no"}, "missing_field", "line 2: prompt", "put the question into `prompt`"),
        (
            {"prompt": "x", "chosen": [ASK, SAY], "rejected": [ASK, NO]},
            "ambiguous_row",
            "line 2: prompt",
            "remove `prompt`",
        ),
        (
            {"prompt": [ASK], "chosen": [{**ASK, "content": "other"}, SAY], "rejected": [NO]},
            "role_order",
            "line 2: chosen[0].role",
            "leave the turns of the prompt out of `chosen`",
        ),
        ({"prompt": "q", "chosen": "a"}, "missing_field", "line 2: rejected", "`preference` needs `rejected`"),
    ],
)
def test_faults_of_pairs(tmp_path: Path, bad: dict[str, Any], code: str, field: str, words: str) -> None:
    (fault,) = checked(tmp_path, PAIR, bad, PAIR).faults
    assert (fault.code, fault.field, fault.line) == (code, field, 2)
    assert words in fault.message


@pytest.mark.parametrize(
    ("bad", "code", "field", "words"),
    [
        ({"labels": ["good", "bad"]}, "invalid_type", "line 2: labels[0]", "not 'good'; write it as a JSON boolean"),
        ({"labels": [1, 0]}, "invalid_type", "line 2: labels[0]", "not a number"),
        ({"labels": [True]}, "label_count", "line 2: labels", "1 labels for 2 steps"),
        ({"labels": True}, "invalid_type", "line 2: labels", "one for each step, not a boolean"),
        ({"completions": "a\n\nb"}, "invalid_type", "line 2: completions", "split the text at its separator"),
        ({"completions": [], "labels": []}, "empty", "line 2: completions", "at least one step"),
        ({"completions": ["a", " "]}, "empty", "line 2: completions[1]", "only white space"),
        ({"completions": ["a", 3]}, "invalid_type", "line 2: completions[1]", "expected a string, not a number"),
        ({"prompt": ""}, "empty", "line 2: prompt", "must not be empty"),
    ],
)
def test_faults_of_steps(tmp_path: Path, bad: dict[str, Any], code: str, field: str, words: str) -> None:
    fault = checked(tmp_path, STEPS, {**STEPS, **bad}, STEPS).faults[0]
    assert (fault.code, fault.field, fault.line) == (code, field, 2)
    assert words in fault.message


def test_a_step_that_is_lacking_is_named_as_such(tmp_path: Path) -> None:
    (fault,) = checked(tmp_path, {"prompt": "q", "completions": ["a"]}).faults
    assert (fault.code, fault.field) == ("missing_field", "line 1: labels")


def test_labels_of_one_class_and_of_strings(tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "a", "label": True}
    for rows in ([row] * 3, [row] * 9000):  # one by one, and by blocks
        report = checked(tmp_path, *rows, format="kto")
        assert report.ok and [notice.code for notice in report.notices] == ["one_class"]
        assert "every `label` is true" in report.notices[0].message
        assert checked(tmp_path, *rows, {**row, "label": False}, format="kto").notices == ()
    (fault,) = checked(tmp_path, row, {**row, "label": "good"}, format="kto").faults
    assert (fault.code, fault.field) == ("invalid_type", "line 2: label")
    assert "true (good, right) or false (bad, wrong), not 'good'" in fault.message


def test_a_prompt_found_in_the_answers_is_told(tmp_path: Path) -> None:
    report = checked(tmp_path, *[{"chosen": "The sky is blue.", "rejected": "The sky is green."}] * 2)
    assert report.ok and report.format == "preference"
    assert [(notice.code, notice.line) for notice in report.notices] == [("implicit_prompt", 1)]


def test_containers(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text('prompt,completions,labels\nq,"[""a"", ""b""]","[true, false]"\n')
    report = check_file(csv)
    assert (report.ok, report.format, report.rows) == (True, "stepwise", 1)
    csv.write_text("prompt,chosen,rejected,margin\nq,a,b,0.5\nq,a,b,\n")
    assert check_file(csv).ok
    csv.write_text("prompt,chosen,rejected,margin\nq,a,b,much\n")
    assert [fault.field for fault in check_file(csv).faults] == ["line 2: margin"]
    sink = io.BytesIO()
    pq.write_table(pa.table({name: [value] for name, value in STEPS.items()}), sink)
    csv.write_bytes(sink.getvalue())
    assert check_file(csv).format == "stepwise"
    mapped = {"question": "q", "steps": ["a"], "right": [True]}
    columns = {"prompt": "question", "completions": "steps", "labels": "right"}
    assert checked(tmp_path, mapped, columns=columns).format == "stepwise"
    (fault,) = checked(tmp_path, {**mapped, "right": ["+"]}, columns=columns).faults
    assert fault.field == "line 1: right[0]"


USUAL = [
    ("preference", PAIR, {"prompt": "r", "chosen": 'c: \\" d', "rejected": "é"}),
    ("preference", {**PAIR, "margin": 1}, {**PAIR, "margin": -0.5}),
    (
        "preference",
        {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]},
        {"prompt": [ASK, SAY, ASK], "chosen": [NO], "rejected": [SAY]},
    ),
    (
        "preference",
        {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"chosen": [ASK, NO, ASK, SAY], "rejected": [ASK, NO, ASK, NO]},
    ),
    (
        "kto",
        {"prompt": "q", "completion": "a", "label": True, "id": 1},
        {"prompt": "q", "completion": "b", "label": False, "id": 2},
    ),
    (
        "kto",
        {"prompt": [ASK], "completion": [SAY], "label": True},
        {"prompt": [ASK], "completion": [NO], "label": True},
    ),
    ("stepwise", STEPS, {**STEPS, "completions": ["one"], "labels": [False]}),
    ("stepwise", {**STEPS, "prompt": [ASK]}, {**STEPS, "prompt": [ASK, SAY, ASK]}),
]

UNUSUAL: dict[str, list[dict[str, Any]]] = {
    "preference": [
        {**PAIR, "rejected": "a"},
        {**PAIR, "chosen": " "},
        {**PAIR, "prompt": ""},
        {**PAIR, "margin": 1e9},
        {**PAIR, "rejected": "\0"},
        {**PAIR, "margin": "1"},
        {**PAIR, "extra": [1]},
        {**PAIR, "prompt": None},
        {"prompt": [ASK, SAY], "chosen": [SAY], "rejected": [NO]},
        {"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [NO]},
        {"prompt": [ASK], "chosen": [], "rejected": [NO]},
        {"chosen": [ASK, SAY], "rejected": [ASK, SAY]},
        {"chosen": [ASK, SAY], "rejected": [SAY, NO]},
        {"chosen": [SAY], "rejected": [NO]},
    ],
    "kto": [
        {"prompt": "q", "completion": "", "label": True},
        {"prompt": "q", "completion": "a", "label": 1},
        {"prompt": "q", "completion": "a", "label": "true"},
        {"prompt": [ASK], "completion": [ASK], "label": True},
    ],
    "stepwise": [
        {**STEPS, "labels": [True]},
        {**STEPS, "labels": [1, 0]},
        {**STEPS, "completions": ["a", ""]},
        {**STEPS, "completions": [], "labels": []},
        {**STEPS, "prompt": " "},
        {**STEPS, "prompt": [ASK, SAY]},
    ],
}


@pytest.mark.parametrize(("name", "first", "other"), USUAL)
def test_blocks_of_usual_rows(name: Any, first: dict[str, Any], other: dict[str, Any]) -> None:
    def lines(*rows: dict[str, Any]) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    read(first, name), read(other, name)
    found = UsualLines(name, {}, first).rows(lines(first, other, first))
    assert found is not None and found.rows == 3
    if name == "kto":
        assert found.labels == {first["label"], other["label"]}
    for bad in UNUSUAL[name]:
        assert UsualLines(name, {}, first).rows(lines(first, bad)) is None, bad
        like_it = UsualLines(name, {}, bad).rows(lines(bad))
        faults = Faults()
        assert like_it is None or RowChecker(name, {}, faults).row(1, bad) is not None, bad


def test_several_processes_count_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORTH_BYTES", 0)
    monkeypatch.setattr(parallel, "processes", lambda: 2)
    row = {"prompt": "q", "completion": "a" * 60, "label": True}
    rows = [row] * 12_000
    assert [notice.code for notice in checked(tmp_path, *rows, format="kto").notices] == ["one_class"]
    report = checked(tmp_path, *rows, {**row, "label": False}, *rows, format="kto")
    assert (report.rows, report.notices) == (24_001, ())
