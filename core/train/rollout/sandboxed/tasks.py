"""Rows of tasks of reasoning-gym and games of textarena, generated in the sandbox into an entry of the model cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, assert_never

from core.errors import DataError
from core.sandbox.sandbox import ProgramLimits, ProgramSandbox
from core.spec.axes.data import MOST_PROBLEMS, GameRows, Generated, TaskRows
from core.spec.run.model_cache import MODEL, task_key
from core.tools import ToolSet, requirements
from core.train.hub.model_cache import ModelCache
from core.train.tools.install import Tools, install

TASKS = (Path(__file__).parent / "task_program.py").read_text(encoding="utf-8")
GAMES = (Path(__file__).parent / "game_program.py").read_text(encoding="utf-8")
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


def limits_of(program: str, tools: Tools) -> ProgramLimits:
    """Bounds of programs that see the libraries of one of ours, such as TASKS, imported."""
    return ProgramLimits(folders=(str(tools.folder.resolve()),), prelude=warmed(program))


def prepare_problems(
    source: Generated,
    field: str,
    cache: ModelCache,
    cache_dir: Path,
    *,
    offline: bool,
    told: Callable[[str, int, int | None], None],
) -> tuple[list[Path], dict[str, Any]]:
    """The file of the rows of a task or game, generated where it is not there, and where it came from. `told`: phase,
    problems done, problems in all.

    Raises DataError for options that the library refuses, ToolsMissing, NoSandbox.
    """
    about = source.model_dump(mode="json")
    library, program = _made_by(source)
    version = hashlib.sha256(requirements(library).read_bytes() + program.encode()).hexdigest()[:16]
    made = hashlib.sha256(json.dumps([about, version], sort_keys=True).encode()).hexdigest()
    key = task_key(source.name, made[:32])
    entry = cache.entry(key)
    if entry is None:
        with cache.lock(key, lambda: told("waiting", 0, None)) as work:
            entry = cache.entry(key)
            if entry is None:
                told("installing", 0, None)
                tools = install(library, cache_dir, offline=offline, field=field)
                shutil.rmtree(work / MODEL, ignore_errors=True)
                (work / MODEL).mkdir()
                _write(source, field, work / MODEL / "rows.jsonl", tools, told)
                entry = cache.commit(key, work, about, Problems(source.size))
    return sorted(entry.model_dir.iterdir()), entry.source


def _made_by(source: Generated) -> tuple[ToolSet, str]:
    """The set of the library that makes the rows, and the program over it."""
    match source:
        case TaskRows():
            return "tasks", TASKS
        case GameRows():
            return "games", GAMES
        case _ as never:
            assert_never(never)


def _write(
    source: Generated, field: str, path: Path, tools: Tools, told: Callable[[str, int, int | None], None]
) -> None:
    _, program = _made_by(source)
    leveled = {"level": source.level} if isinstance(source, TaskRows) else {}
    with ProgramSandbox(limits_of(program, tools)) as sandbox, path.open("w", encoding="utf-8") as file:
        for done in range(0, source.size, AT_ONCE):
            first = source.seed * MOST_PROBLEMS + done
            arguments = {
                "name": source.name,
                "options": source.options,
                "first": first,
                "count": min(AT_ONCE, source.size - done),
            }
            outcome = sandbox.run_function(program, "generate", arguments | leveled, seconds=SECONDS)
            if outcome.error is not None or isinstance(outcome.value, str):
                why = outcome.value if outcome.error is None else outcome.error.splitlines()[0]
                settings = "problems with this level and these options" if leveled else "games with these options"
                raise DataError(
                    f"the {source.type} `{source.name}` makes no {settings}: {why}",
                    field=f"{field}.options",
                    code="task_refused",
                )
            for number, problem in enumerate(outcome.value, first):
                file.write(json.dumps(_row(source, problem, number), ensure_ascii=False) + "\n")
            told("converting", min(done + AT_ONCE, source.size), source.size)


def _row(source: Generated, problem: Any, number: int) -> dict[str, Any]:
    prompt = problem if isinstance(source, GameRows) else problem["question"]
    if source.instruction is not None:
        prompt = f"{prompt}\n\n{source.instruction}"
    if isinstance(source, GameRows):
        return {"prompt": prompt, "game": {"name": source.name, "options": source.options, "number": number}}
    if source.format == "prompt_completion":
        return {"prompt": prompt, "completion": problem["answer"]}
    answered = {} if problem["answer"] is None else {"reference": problem["answer"]}
    of = {"name": source.name, "level": source.level, "options": source.options}
    return {"prompt": prompt, **answered, "task": of | problem}
