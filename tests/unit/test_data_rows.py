"""Every way a data file can be wrong is named with its line and field; nothing is guessed."""

from __future__ import annotations

import json

import pytest

from core.data import checker as rows
from core.data.checker import FileReport, RowChecker
from core.data.rows import Chat, Instruction, PromptCompletion, Text

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def check(*lines: object, declared: str = "auto") -> FileReport:
    checker = RowChecker(declared)  # type: ignore[arg-type]
    raw = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    checker.feed(raw)
    return checker.finish()


@pytest.mark.parametrize(
    ("row", "name", "kind"),
    [
        (CHAT, "messages", Chat),
        ({"prompt": "", "completion": "b", "id": 3}, "prompt_completion", PromptCompletion),
        ({"instruction": "a", "output": "b"}, "instruction", Instruction),
        ({"instruction": "a", "input": None, "output": "b"}, "instruction", Instruction),
        ({"text": "a"}, "text", Text),
    ],
)
def test_formats(row: dict[str, object], name: str, kind: type) -> None:
    checker = RowChecker()
    (parsed,) = checker.feed(json.dumps(row).encode() + b"\r\n")
    assert isinstance(parsed, kind)
    report = checker.finish()
    assert (report.ok, report.rows, report.format) == (True, 1, name)


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (b"{not json", "invalid_json", "line 2"),
        (b'{"text": "caf\xe9"}', "invalid_utf8", "line 2"),
        (b"[1]", "invalid_row", "line 2"),
        (b"[" * 100_000, "invalid_json", "line 2"),
        (b'{"text": "a", "text": "b"}', "invalid_json", "line 2"),
        (b'{"text": "a", "x": NaN}', "invalid_json", "line 2"),
        ({"prompt": "a"}, "missing_field", "line 2: completion"),
        ({"instruction": "a", "input": "b"}, "missing_field", "line 2: output"),
        ({"question": "a"}, "unknown_format", "line 2"),
        ({"text": "a"}, "mixed_formats", "line 2"),
        ({**CHAT, "text": "a"}, "ambiguous_row", "line 2"),
        ({**CHAT, "tools": [1]}, "unsupported_field", "line 2: tools"),
        ({"messages": "hello"}, "invalid_type", "line 2: messages"),
        ({"messages": []}, "empty", "line 2: messages"),
        ({"messages": ["hi"]}, "invalid_type", "line 2: messages[0]"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "unknown_role", "line 2: messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "missing_field", "line 2: messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "invalid_type", "line 2: messages[0].content"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "empty", "line 2: messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "unsupported_field",
            "line 2: messages[0].weight",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "no_answer", "line 2: messages[0].role"),
        (
            b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
            "invalid_unicode",
            "line 2: messages[0].content",
        ),
    ],
)
def test_a_fault_names_its_place(bad: object, code: str, field: str) -> None:
    report = check(CHAT, bad, CHAT)
    assert [(fault.code, fault.field) for fault in report.faults] == [(code, field)]
    assert report.rows == 2
    assert report.format == "messages"


def test_declared_format_settles_an_ambiguous_file() -> None:
    both = {**CHAT, "text": "a"}
    assert check(both, both, declared="text").ok
    assert check(CHAT, declared="text").faults[0].field == "line 1: text"


def test_blank_lines_may_only_end_a_file() -> None:
    assert check(CHAT, b"", b"  ").ok
    assert [fault.field for fault in check(CHAT, b"", b"", CHAT).faults] == ["line 2"]


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_a_fault(raw: bytes) -> None:
    checker = RowChecker()
    checker.feed(raw)
    report = checker.finish()
    assert not report.ok
    assert report.rows == 0


def test_faults_are_capped_but_counted() -> None:
    report = check(*[b"x"] * 200)
    assert len(report.faults) == rows.MAX_FAULTS
    assert report.fault_count == 200


def test_any_cut_of_the_stream_gives_the_same_report() -> None:
    raw = b"\xef\xbb\xbf" + b"\n".join([json.dumps(CHAT).encode(), b'{"bad": "\xc3\xa9"}', json.dumps(CHAT).encode()])
    whole = RowChecker()
    whole.feed(raw)
    expected = whole.finish()
    assert expected.rows == 2
    for size in (1, 2, 7):
        checker = RowChecker()
        got = [row for start in range(0, len(raw), size) for row in checker.feed(raw[start : start + size])]
        assert checker.finish() == expected
        assert len(got) == 1  # the last line has no end: it is counted by finish()


def test_an_endless_line_stays_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    checker = RowChecker()
    for _ in range(100):
        checker.feed(b"x" * 100)
        assert len(checker._rest) <= 1101
    checker.feed(b"\n" + json.dumps(CHAT).encode())
    report = checker.finish()
    assert [(fault.code, fault.field) for fault in report.faults] == [("too_long", "line 1")]
    assert report.rows == 1
