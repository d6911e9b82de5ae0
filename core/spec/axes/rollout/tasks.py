"""The tasks of reasoning-gym by name: what a job may ask of each (tasks.json, which `python -m tests.support.tasks`
writes from the library itself)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).with_name("tasks.json")
SHOWN = 3
"""Near names that an error lists."""
PAGE = "docs/tasks.md lists them all"


@dataclass(frozen=True, slots=True)
class Task:
    """A generator of problems with its verifier."""

    category: str
    levels: int
    """Levels of difficulty, from 0 on; 0: it has none."""
    answered: bool
    """Whether a problem comes with an answer. Otherwise only the verifier knows a right one."""
    options: Mapping[str, Any]
    """Options with their defaults."""


@cache
def tasks() -> Mapping[str, Task]:
    """Every task by its name."""
    return {name: Task(**about) for name, about in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def wrong_name(name: str) -> str | None:
    """Why there is no such task, with those of a similar name."""
    if name in tasks():
        return None
    return f"there is no task `{name[:60]}`{near(name, list(tasks()))}; {PAGE}"


def wrong_settings(name: str, level: int | None, options: Mapping[str, Any]) -> str | None:
    """Why a task cannot be had in this level with these options, as far as the table says."""
    task = tasks()[name]
    if level is not None and level >= task.levels:
        has = f"levels 0 to {task.levels - 1}" if task.levels else "no levels"
        return f"the task `{name}` has {has}"
    return wrong_options(f"task `{name}`", task.options, options)


def wrong_options(whose: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Why something with these options and defaults has none of these."""
    for key, value in options.items():
        if key not in known:
            names = ", ".join(f"`{one}`" for one in known) or "none"
            return f"the {whose} has no option `{key[:60]}`{near(key, list(known))}; it has {names}"
        default = known[key]
        if default is not None and value is not None and _kind(value) != _kind(default):
            return f"the option `{key}` of the {whose} is a {_kind(default)}, as in its default {default!r}"
    return None


def near(word: str, known: Sequence[str]) -> str:
    """Names like this one, as the end of a sentence."""
    found = difflib.get_close_matches(word.lower(), known, SHOWN)
    return f"; did you mean {' or '.join(f'`{one}`' for one in found)}?" if found else ""


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "truth value"
        case int() | float():
            return "number"
        case str():
            return "text"
        case _:
            return "list"


def page() -> str:
    """docs/tasks.md."""
    lines = [
        "# Tasks",
        "",
        "Generated from `core/spec/axes/rollout/tasks.json` by `make docs`. A task is a generator of",
        "[reasoning-gym](https://github.com/open-thought/reasoning-gym) (Apache-2.0): it makes problems and verifies",
        "answers. [rollouts.md](rollouts.md#tasks) says how a job uses one.",
        "",
        "`levels`: values of `level`, from easy to hard. `options`: names and defaults of `options`; a long list is",
        "cut off. Tasks marked * have no answer of their own, and only the verifier knows a right one. The tasks",
        "`codeio`, `game_of_life`, `game_of_life_halting` and `zebra_puzzles` are not offered, because libraries that",
        "they need are published without wheels.",
    ]
    category = ""
    for name, task in sorted(tasks().items(), key=lambda item: (item[1].category, item[0])):
        if task.category != category:
            category = task.category
            lines += ["", f"## {category}", "", "| task | levels | options |", "|---|---|---|"]
        levels = f"0 to {task.levels - 1}" if task.levels else ""
        lines.append(f"| `{name}`{'' if task.answered else ' *'} | {levels} | {shown_options(task.options)} |")
    return "\n".join(lines) + "\n"


def shown_options(options: Mapping[str, Any]) -> str:
    """Names and defaults, for a table."""
    return ", ".join(f"`{key}` {_shown(value)}" for key, value in options.items())


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return (text if len(text) <= 60 else f"{text[:57]}…").replace("|", "\\|")
