"""docs/data.md is true: its rows are read as the formats they stand under, its jobs are jobs."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from core import HOME
from core.data.check import FileCheck
from core.spec.axes.data import FORMATS, Format
from core.spec.load import load_yaml, parse_job

PAGE = (HOME / "docs" / "data.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def rows() -> list[tuple[str, str]]:
    """(format, row): the last format named at the start of a line before the block."""
    found = []
    for block in BLOCK.finditer(PAGE):
        named = re.findall(r"^`(\w+)`(?: \(|:| is not detected)", PAGE[: block.start()], re.MULTILINE)
        if block[1] == "json":
            found.append((named[-1], block[2]))
    return found


@pytest.mark.parametrize(("name", "row"), rows())
def test_the_rows(name: Any, row: str) -> None:
    json.loads(row)
    check = FileCheck(name if name == "kto" else "auto")
    check.feed(row.encode())
    report = check.finish()
    assert (report.format, report.rows, report.fault_count) == (name, 1, 0), report.faults


def test_every_format_has_one() -> None:
    assert {name for name, _ in rows()} == set(FORMATS)
    assert set(get_args(Format)) == {"auto", *FORMATS}
    assert all(f"| `{name}` |" in PAGE for name in FORMATS)


def test_the_jobs() -> None:
    jobs = [block[2] for block in BLOCK.finditer(PAGE) if block[1] == "yaml"]
    assert len(jobs) == 3
    for job in jobs:
        assert parse_job({"model": "team/tiny", **load_yaml(job.encode())}).data
