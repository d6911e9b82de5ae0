"""The program behind tasks of reasoning-gym: problems and their verifiers. It is run by its source, in the sandbox,
and imports nothing of ours.

A problem is generated from (task, level, options, number) alone. Its metadata is kept as Python writes it, because
verifiers compare tuples, which JSON does not have.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import signal
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WITHOUT_WHEELS = ("cellpylib", "pycosat", "zss")
"""Libraries that some tasks need and that are published as sources only, so that they are not installed."""
NEED_THEM = ("codeio", "game_of_life", "game_of_life_halting", "zebra_puzzles")
"""The tasks that need one of them."""
MIXTURES = ("composite",)
"""A mixture of tasks, which the data axis has itself."""


class Placeholder:
    """Finds an empty module for each of WITHOUT_WHEELS: reasoning-gym imports all tasks at once."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, Placeholder()) if name in WITHOUT_WHEELS else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None: ...


class TimeIsUp(BaseException):
    """No Exception: verifiers catch those."""


def warm() -> None:
    """Import all tasks, which takes seconds; every program finds them imported."""
    sys.meta_path.append(Placeholder)
    import reasoning_gym

    assert reasoning_gym.create_dataset


def describe() -> dict[str, Any]:
    """Every task that is offered: its category, the number of its levels, its options with their defaults, and whether
    its problems come with an answer."""
    import reasoning_gym.factory as factory

    found = {}
    for name in sorted(factory.DATASETS):
        if name in (*NEED_THEM, *MIXTURES):
            continue
        made, config = factory.DATASETS[name]
        curriculum = factory.CURRICULA.get(name)
        levels = max((len(one.levels) for one in curriculum().attributes.values()), default=0) if curriculum else 0
        options = {}
        for field in dataclasses.fields(config):
            with suppress(TypeError):  # what JSON cannot say is no option
                options[field.name] = _plain(_default(field))
        del options["seed"], options["size"]
        problem = _dataset(name, None, {}, 0, 1)[0]
        found[name] = {
            "category": made.__module__.split(".")[1],
            "levels": levels,
            "answered": problem["answer"] is not None,
            "options": options,
        }
    return found


def generate(
    name: str, level: int | None, options: dict[str, Any], first: int, count: int
) -> list[dict[str, Any]] | str:
    """Problems first, first + 1, … of a task as {question, answer, metadata}; or what is wrong with the options."""
    try:
        dataset = _dataset(name, level, options, first, count)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error) or type(error).__name__
    problems = [dataset[at] for at in range(count)]
    return [
        {
            "question": str(one["question"]),
            "answer": None if one["answer"] is None else str(one["answer"]),
            "metadata": repr(_plain(one["metadata"])),
        }
        for one in problems
    ]


def score(problems: list[dict[str, Any]], answers: list[str], seconds: float) -> list[float | str]:
    """What each answer to its problem is worth; where that cannot be computed in `seconds`, why."""
    made: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, _ring)
    return [_score(made, problem, answer, seconds) for problem, answer in zip(problems, answers, strict=True)]


def _score(made: dict[str, Any], problem: dict[str, Any], answer: str, seconds: float) -> float | str:
    key = json.dumps([problem["name"], problem["level"], problem["options"]], sort_keys=True)
    if key not in made:
        made[key] = _dataset(problem["name"], problem["level"], problem["options"], 0, 1)
    entry = {
        "question": problem["question"],
        "answer": problem["answer"],
        "metadata": ast.literal_eval(problem["metadata"]),
    }
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        value = float(made[key].score_answer(answer, entry))
    except TimeIsUp:
        return f"not verified after {seconds:g} s"
    except Exception as error:
        return f"the verifier of `{problem['name']}` cannot read it: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return value if math.isfinite(value) else f"the verifier of `{problem['name']}` answered {value}"


def _ring(number: int, frame: Any) -> None:
    raise TimeIsUp


def _dataset(name: str, level: int | None, options: dict[str, Any], first: int, count: int) -> Any:
    """A task whose problem 0 is the one of number `first`: reasoning-gym draws each by the sum of seed and place."""
    import reasoning_gym.factory as factory

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    made, config = factory.DATASETS[name]
    if level is None:
        settings = config(**given, seed=first, size=count)
    else:
        curriculum = factory.CURRICULA[name]()
        curriculum.set_global_level(level)
        settings = dataclasses.replace(curriculum.generate_configuration(), **given, seed=first, size=count)
    return made(config=settings)


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _plain(value: Any) -> Any:
    """What Python can read back as it writes it: arrays and numbers of NumPy as lists and numbers, enumerations as
    their values."""
    match value:
        case dict():
            return {_plain(key): _plain(one) for key, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case tuple():
            return tuple(_plain(one) for one in value)
        case None | bool():
            return value
        case str():
            return str(value.value) if hasattr(value, "value") else str(value)
        case int() | float():
            return value.item() if hasattr(value, "item") else value
        case set() | frozenset():
            return {_plain(one) for one in value}
    for name in ("tolist", "item", "value"):
        if (found := getattr(value, name, None)) is not None:
            return _plain(found() if callable(found) else found)
    raise TypeError(f"{type(value).__name__} in a problem")
