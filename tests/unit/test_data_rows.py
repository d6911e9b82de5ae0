"""Every way a data file can be wrong is named with its line and field; nothing is guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.data import faults
from core.data.check import FileCheck, FileReport
from core.data.checker import RowChecker
from core.data.containers import jsonl
from core.data.faults import Faults
from core.data.rows import (
    Chat,
    Instruction,
    Labelled,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Row,
    Text,
    ToolCall,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def read(value: Any, declared: Any = "auto", **columns: str) -> Row:
    """The one row that a value is, without a fault."""
    found = Faults(columns)
    row = RowChecker(declared, columns, found).row(1, value)
    assert row is not None, found.kept
    return row


def check(*lines: object, declared: Any = "auto", **columns: str) -> FileReport:
    checker = FileCheck(declared, columns)
    raw = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    checker.feed(raw)
    return checker.finish()


ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "ho"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

FORMATS = [
    (CHAT, "messages", Chat),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt", Chat),
    ({"prompt": "", "completion": "b", "id": 3}, "prompt_completion", PromptCompletion),
    ({"prompt": [ASK], "completion": [SAY]}, "prompt_completion", Chat),
    ({"instruction": "a", "output": "b"}, "instruction", Instruction),
    ({"instruction": "a", "input": None, "output": "b"}, "instruction", Instruction),
    ({"text": "a"}, "text", Text),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", Preference),
    ({"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": "no"}]}, "preference", Preference),
    (
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
        "preference",
        Preference,
    ),
    (
        {"input": {"messages": [ASK]}, "preferred_output": [SAY], "non_preferred_output": [{**SAY, "content": "no"}]},
        "preference",
        Preference,
    ),
    ({"prompt": "a", "reference": "4", "level": 2}, "prompt", PromptOnly),
]


@pytest.mark.parametrize(("row", "name", "kind"), FORMATS)
def test_formats(row: dict[str, object], name: str, kind: type) -> None:
    assert isinstance(read(row), kind)
    report = check(row)
    assert (report.ok, report.rows, report.format) == (True, 1, name)
    assert check(row, declared=name).ok


def test_a_kto_row_is_told_from_a_chat_by_word_only() -> None:
    pair, chat = {"prompt": "a", "completion": "b", "label": True}, {**CHAT, "label": False}
    for row in (pair, chat):
        assert check(row).faults[0].code == "ambiguous_row"
        assert check(row, declared="kto").ok
    assert read(pair, "kto") == Labelled("a", "b", True)
    assert read(chat, "kto") == Labelled((Message("user", "hi"),), (Message("assistant", "ho"),), False)
    assert read({"prompt": "a", "completion": "b", "label": "joke"}) == PromptCompletion("a", "b")


def test_what_a_chat_says_is_kept() -> None:
    row = read(
        {
            "tools": [TOOL],
            "messages": [
                {"role": "developer", "content": "be brief", "name": None},
                {**ASK, "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "eva"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {**SAY, "reasoning_content": "two, so", "weight": 1},
            ],
        }
    )
    assert row == Chat(
        (
            Message("developer", "be brief"),
            Message("user", "hi", name="eva"),
            Message("assistant", "", weight=0, tool_calls=(ToolCall("c1", "add", {"a": 1}),)),
            Message("tool", "2", tool_call_id="c1"),
            Message("assistant", "ho", weight=1, reasoning="two, so"),
        ),
        (TOOL,),
    )
    assert isinstance(row, Chat)
    assert row.messages[2].as_dict() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert row.messages[4].as_dict() == {"role": "assistant", "content": "ho", "reasoning_content": "two, so"}


def test_sharegpt_becomes_the_same_chat() -> None:
    row = read(
        {
            "system": "be brief",
            "tools": json.dumps([TOOL["function"]]),
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "ho"},
            ],
        }
    )
    assert row == Chat(
        (
            Message("system", "be brief"),
            Message("user", "hi"),
            Message("assistant", "", tool_calls=(ToolCall(None, "add", {"a": 1}),)),
            Message("tool", "2"),
            Message("assistant", "ho"),
        ),
        (TOOL,),
    )


def test_columns_give_other_names() -> None:
    row = {"question": "a", "answer": "b", "id": 3}
    assert check(row).faults[0].code == "unknown_format"
    report = check(row, row, declared="prompt_completion", prompt="question", completion="answer")
    assert (report.ok, report.rows, report.columns) == (True, 2, {"prompt": "question", "completion": "answer"})
    assert read({"text": "a", "intent": "b"}, prompt="text", completion="intent") == PromptCompletion("a", "b")
    missing = check({"question": "a"}, prompt="question", completion="answer").faults[0]
    assert (missing.code, missing.field) == ("missing_field", "line 1: answer")
    wrong = check({"question": "a", "answer": 3}, prompt="question", completion="answer").faults[0]
    assert (wrong.code, wrong.field, wrong.line) == ("invalid_type", "line 1: answer", 1)


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
        ({**CHAT, "tools": [1]}, "invalid_type", "line 2: tools[0]"),
        ({**CHAT, "functions": [{}]}, "unsupported_field", "line 2: functions"),
        ({"messages": None}, "invalid_type", "line 2: messages"),
        ({"messages": [None, SAY]}, "invalid_type", "line 2: messages[0]"),
        ({"messages": [{"role": None, "content": "a"}, SAY]}, "unknown_role", "line 2: messages[0].role"),
        ({"messages": [{"role": "user", "content": None}, SAY]}, "invalid_type", "line 2: messages[0].content"),
        ({"messages": [ASK, {"role": "system", "content": "a"}, SAY]}, "role_order", "line 2: messages[1].role"),
        ({"messages": [{"role": "tool", "content": "a"}, SAY]}, "role_order", "line 2: messages[0].role"),
        ({"messages": [ASK, {**SAY, "weight": 2}]}, "invalid_value", "line 2: messages[1].weight"),
        ({"messages": [ASK, {**SAY, "weight": 0}]}, "nothing_to_learn", "line 2: messages"),
        ({"messages": [ASK, {**SAY, "audio": {}}]}, "unsupported_field", "line 2: messages[1].audio"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "empty", "line 2: messages[1].content"),
        (
            {"messages": [ASK, {**SAY, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]}]},
            "invalid_json",
            "line 2: messages[1].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    ASK,
                    {**SAY, "tool_calls": [CALL]},
                    {"role": "tool", "content": "", "tool_call_id": "x"},
                    SAY,
                ]
            },
            "unknown_call",
            "line 2: messages[2].tool_call_id",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a\\u0000b"}, {"role": "assistant", "content": "c"}]}',
            "nul_character",
            "line 2: messages[0].content",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a\x00b"}, {"role": "assistant", "content": "c"}]}',
            "invalid_json",
            "line 2",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}',
            "invalid_json",
            "line 2",
        ),
        ({"messages": "hello"}, "invalid_type", "line 2: messages"),
        ({"messages": []}, "empty", "line 2: messages"),
        ({"messages": ["hi"]}, "invalid_type", "line 2: messages[0]"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "unknown_role", "line 2: messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "missing_field", "line 2: messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "invalid_type", "line 2: messages[0].content"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "empty", "line 2: messages[0].content"),
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
    checker = FileCheck()
    checker.feed(raw)
    report = checker.finish()
    assert not report.ok
    assert report.rows == 0


def test_faults_are_capped_but_counted() -> None:
    report = check(*[json.dumps({"messages": [{"role": f"robot{at}", "content": "x"}]}).encode() for at in range(200)])
    assert len(report.faults) == faults.MAX_FAULTS
    assert report.fault_count == 200


def test_one_cause_is_told_once_with_its_lines() -> None:
    question = json.dumps({"question": "a", "answer": "b"}).encode()
    (fault,) = check(*[question] * 60).faults
    assert (fault.field, fault.line, fault.times) == ("lines 1 to 60", 1, 60)
    assert "`columns: {prompt: question, completion: answer}`, or " in fault.message
    assert "`--column prompt=question --column completion=answer` on the command line" in fault.message
    good, bad = json.dumps(CHAT).encode(), b'{"messages": []}'
    report = check(good, bad, good, bad, bad, bad, good, bad, b"x", bad)
    assert [fault.field for fault in report.faults] == ["lines 2, 4 to 6, 8 and 10: messages", "line 9"]
    assert (report.fault_count, report.rows) == (7, 3)
    scattered = check(*[bad if at % 2 else good for at in range(100)])
    assert [fault.field for fault in scattered.faults] == ["lines 2, 4, 6, 8, 10, 12 and 44 more: messages"]


def test_any_cut_of_the_stream_gives_the_same_report() -> None:
    raw = b"\xef\xbb\xbf" + b"\n".join([json.dumps(CHAT).encode(), b'{"bad": "\xc3\xa9"}', json.dumps(CHAT).encode()])
    whole = FileCheck()
    whole.feed(raw)
    expected = whole.finish()
    assert (expected.rows, expected.fault_count) == (2, 1)
    for size in (1, 2, 7):
        checker = FileCheck()
        for start in range(0, len(raw), size):
            checker.feed(raw[start : start + size])
        assert checker.finish() == expected


def test_an_endless_line_stays_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 200_000)
    checker = FileCheck()
    checker.feed(json.dumps(CHAT).encode() + b"\n")
    for _ in range(100):
        checker.feed(b"x" * 10_000)
        assert len(checker._rest) + len(getattr(checker._reader, "_rest", b"")) <= 211_000
    checker.feed(b"\n" + json.dumps(CHAT).encode())
    report = checker.finish()
    assert [(fault.code, fault.field) for fault in report.faults] == [("too_long", "line 2")]
    assert report.rows == 2
