"""The table of tasks (core/spec/axes/rollout/tasks.json) from the library itself.

`python -m tests.support.tasks` writes it.
"""

from __future__ import annotations

import json
from typing import Any

from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.tasks import TABLE
from core.train.rollout.sandboxed.tasks import TASKS, task_limits
from tests.support.tools import task_tools


def described(sandbox: ProgramSandbox) -> dict[str, Any]:
    """Every task as the installed library has it."""
    outcome = sandbox.run_function(TASKS, "describe", {}, seconds=600)
    assert outcome.error is None, outcome.error
    found: dict[str, Any] = outcome.value
    return found


if __name__ == "__main__":
    with ProgramSandbox(task_limits(task_tools())) as opened:
        rows = [f"{json.dumps(name)}: {json.dumps(about)}" for name, about in described(opened).items()]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
