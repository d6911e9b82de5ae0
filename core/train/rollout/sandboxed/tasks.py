"""Rows of tasks of reasoning-gym, generated in the sandbox into an entry of the model cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.errors import DataError
from core.sandbox.sandbox import ProgramLimits, ProgramSandbox
from core.spec.axes.data import MOST_PROBLEMS, TaskRows
from core.spec.run.model_cache import MODEL, task_key
from core.tools import requirements
from core.train.hub.model_cache import ModelCache
from core.train.tools.install import Tools, install

TASKS = (Path(__file__).parent / "task_program.py").read_text(encoding="utf-8")
AT_ONCE = 32
"""Problems that one program generates."""
SECONDS = 600.0
"""Time for those: a few tasks take seconds for a problem."""


@dataclass(frozen=True, slots=True)
class Problems:
    """What a cache entry holds."""

    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def warmed(program: str) -> str:
    """A prelude that runs the function `warm` of a program, in a module of its own."""
    return f"exec({program + chr(10) * 2 + 'warm()'!r}, {{}})"


def task_limits(tools: Tools) -> ProgramLimits:
    """Bounds of programs that see reasoning-gym."""
    return ProgramLimits(folders=(str(tools.folder.resolve()),), prelude=warmed(TASKS))


def prepare_task(
    source: TaskRows,
    field: str,
    cache: ModelCache,
    cache_dir: Path,
    *,
    offline: bool,
    told: Callable[[str, int, int | None], None],
) -> tuple[list[Path], dict[str, Any]]:
    """The file of a task's rows, generated where it is not there, and where it came from. `told`: phase, problems done,
    problems in all.

    Raises DataError for options that the task refuses, ToolsMissing, NoSandbox.
    """
    about = source.model_dump(mode="json")
    library = hashlib.sha256(requirements("tasks").read_bytes() + TASKS.encode()).hexdigest()[:16]
    made = hashlib.sha256(json.dumps([about, library], sort_keys=True).encode()).hexdigest()
    key = task_key(source.name, made[:32])
    entry = cache.entry(key)
    if entry is None:
        with cache.lock(key, lambda: told("waiting", 0, None)) as work:
            entry = cache.entry(key)
            if entry is None:
                told("installing", 0, None)
                tools = install("tasks", cache_dir, offline=offline, field=field)
                shutil.rmtree(work / MODEL, ignore_errors=True)
                (work / MODEL).mkdir()
                _write(source, field, work / MODEL / "rows.jsonl", tools, told)
                entry = cache.commit(key, work, about, Problems(source.size))
    return sorted(entry.model_dir.iterdir()), entry.source


def _write(
    source: TaskRows, field: str, path: Path, tools: Tools, told: Callable[[str, int, int | None], None]
) -> None:
    with ProgramSandbox(task_limits(tools)) as sandbox, path.open("w", encoding="utf-8") as file:
        for done in range(0, source.size, AT_ONCE):
            arguments = {
                "name": source.name,
                "level": source.level,
                "options": source.options,
                "first": source.seed * MOST_PROBLEMS + done,
                "count": min(AT_ONCE, source.size - done),
            }
            outcome = sandbox.run_function(TASKS, "generate", arguments, seconds=SECONDS)
            if outcome.error is not None or isinstance(outcome.value, str):
                why = outcome.value if outcome.error is None else outcome.error.splitlines()[0]
                raise DataError(
                    f"the task `{source.name}` makes no problems with this level and these options: {why}",
                    field=f"{field}.options",
                    code="task_refused",
                )
            for problem in outcome.value:
                file.write(json.dumps(_row(source, problem), ensure_ascii=False) + "\n")
            told("converting", min(done + AT_ONCE, source.size), source.size)


def _row(source: TaskRows, problem: dict[str, Any]) -> dict[str, Any]:
    prompt = problem["question"]
    if source.instruction is not None:
        prompt = f"{prompt}\n\n{source.instruction}"
    if source.format == "prompt_completion":
        return {"prompt": prompt, "completion": problem["answer"]}
    answered = {} if problem["answer"] is None else {"reference": problem["answer"]}
    of = {"name": source.name, "level": source.level, "options": source.options}
    return {"prompt": prompt, **answered, "task": of | problem}
