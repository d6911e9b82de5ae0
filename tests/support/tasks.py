"""The tables of tasks and games (core/spec/axes/rollout/tasks.json and games.json) from the libraries themselves.

`python -m tests.support.tasks` writes them.
"""

from __future__ import annotations

import json
from typing import Any

from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.games import GAMES_TABLE
from core.spec.axes.rollout.tasks import TABLE
from core.train.rollout.sandboxed.tasks import GAMES, TASKS, limits_of
from tests.support.tools import game_tools, task_tools


def described(sandbox: ProgramSandbox, program: str = TASKS) -> dict[str, Any]:
    """Every task or game as the installed library has it."""
    outcome = sandbox.run_function(program, "describe", {}, seconds=600)
    assert outcome.error is None, outcome.error
    found: dict[str, Any] = outcome.value
    return found


if __name__ == "__main__":
    for table, program, tools in ((TABLE, TASKS, task_tools()), (GAMES_TABLE, GAMES, game_tools())):
        with ProgramSandbox(limits_of(program, tools)) as opened:
            rows = [f"{json.dumps(name)}: {json.dumps(about)}" for name, about in described(opened, program).items()]
        table.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
