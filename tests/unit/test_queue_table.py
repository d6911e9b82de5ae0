"""`eft queue` on a narrow terminal: a line for each job, with its name, however long the reason is."""

from __future__ import annotations

import io

from eft.commands.admin.queue import waiting
from rich.console import Console

ROW = {
    "position": 1,
    "job": "job-01m84hb07s0yem0vkcwcx48cyv",
    "name": "alpha",
    "owner": "admin",
    "priority": 0,
    "waiting_since": "2026-11-23T15:45:36Z",
    "estimated_start": None,
    "estimated_gpus": [],
    "reason": "the hub cannot be reached " * 20 + "end",
}


def printed(*, terminal: bool, width: int) -> list[str]:
    """The lines of the table on such a console."""
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
    console.print(waiting([ROW], console))
    return written.getvalue().splitlines()


def test_the_reason_alone_gives_way_on_a_narrow_terminal() -> None:
    head, line = printed(terminal=True, width=80)
    assert "NAME" in head and "OWNER" in head and "WHY" in head
    assert "alpha" in line and "admin" in line and "the hub" in line and "…" in line


def test_nothing_is_cut_in_a_pipe() -> None:
    _, line = printed(terminal=False, width=1000)
    assert str(ROW["job"]) in line and line.rstrip().endswith("end")
