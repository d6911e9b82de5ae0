"""Rewards that are computed in the job's sandbox. A value is a number, or says why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from core.data.rows import PromptOnly
from core.errors import DataError
from core.sandbox.sandbox import ProgramLimits, ProgramSandbox
from core.spec.axes.rollout.environment import EnvironmentArm, GameEnvironment
from core.spec.axes.rollout.reward import CodeReward, MathReward, ProgramReward, PythonReward, RewardArm, TaskReward
from core.tools import ToolSet
from core.train.rollout.rewards import Columns, columns_of, extracted, fenced, name_rows, tests_of
from core.train.rollout.sandboxed.tasks import GAMES, TASKS, limits_of
from core.train.tools.install import Tools, ToolsMissing, find

MATH = (Path(__file__).parent / "math_program.py").read_text(encoding="utf-8")
TASK_SECONDS = 60.0
"""Time of a program that verifies answers, beside that of one answer: some tasks read their words for seconds."""
READ_AT_ONCE = 64
"""Expected answers that one program reads."""


@dataclass(frozen=True, slots=True)
class AnswerFault:
    """The reward is 0 because of the answer, not for what it says: it took too long, say."""

    why: str


Value = float | str | AnswerFault
"""A reward, or why it cannot be computed."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """What an answer answers."""

    line: int
    """Line of the row that the prompt is in."""
    prompt: str
    columns: Columns
    row: PromptOnly | None = None
    """The row as it was written; None where no reward model asks."""


def answered(line: int, prompt: str, row: PromptOnly) -> AnsweredPrompt:
    """The row in this line, whose prompt the model was asked."""
    return AnsweredPrompt(line, prompt, columns_of(row), row)


def values_of(
    reward: ProgramReward,
    answers: Sequence[str],
    asked: Sequence[AnsweredPrompt],
    sandbox: ProgramSandbox,
    between: Callable[[], None] = lambda: None,
) -> list[Value]:
    """Compute a reward of each answer. `between` is called before each answer of `code` and `math`. NoSandbox."""
    match reward:
        case PythonReward():
            return _called(reward, answers, asked, sandbox)
        case CodeReward():
            return _one_by_one(partial(_tested, reward), answers, asked, sandbox, between)
        case MathReward():
            return _one_by_one(partial(_compared, reward), answers, asked, sandbox, between)
        case TaskReward():
            return _verified(reward, answers, asked, sandbox, between)
        case _ as never:
            assert_never(never)


def _one_by_one(
    judge: Callable[[str, AnsweredPrompt, ProgramSandbox], Value],
    answers: Sequence[str],
    asked: Sequence[AnsweredPrompt],
    sandbox: ProgramSandbox,
    between: Callable[[], None],
) -> list[Value]:
    """A program of its own for each answer."""
    found: list[Value] = []
    for answer, one in zip(answers, asked, strict=True):
        between()
        found.append(judge(answer, one, sandbox))
    return found


def _called(
    reward: PythonReward, answers: Sequence[str], asked: Sequence[AnsweredPrompt], sandbox: ProgramSandbox
) -> list[Value]:
    names = {name for one in asked for name in one.columns}
    arguments: dict[str, Any] = {name: [one.columns.get(name) for one in asked] for name in sorted(names)}
    arguments |= {"prompts": [one.prompt for one in asked], "completions": list(answers)}
    outcome = sandbox.run_function(reward.source, reward.function, arguments, seconds=reward.seconds)
    if outcome.error is None:
        return _numbers(outcome.value, len(answers))
    if outcome.ended is not None or len(answers) == 1:
        return [outcome.error] * len(answers)
    # Which answers it fails on, it shows when it gets them alone.
    alone = [_called(reward, [answer], [one], sandbox)[0] for answer, one in zip(answers, asked, strict=True)]
    return alone if any(isinstance(value, str) for value in alone) else [outcome.error] * len(answers)


def _numbers(value: Any, count: int) -> list[Value]:
    if not isinstance(value, list) or len(value) != count:
        found = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
        return [f"it returned {found}; return a list of {count} numbers, one for each of `completions`"] * count
    return [number_of(one) for one in value]


def number_of(value: Any) -> Value:
    """A finite number from what a program answered, or why it is none."""
    if not isinstance(value, int | float):
        return f"it returned a {type(value).__name__} for this answer ({str(value)[:100]!r}); return a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else f"it returned {value!s:.20} for this answer; return a finite number"


def _tested(reward: CodeReward, answer: str, asked: AnsweredPrompt, sandbox: ProgramSandbox) -> float:
    """Share of the tests that pass. Whatever a program of the model's does wrong is a test that it does not pass."""
    tests, source = tests_of(asked.columns[reward.column]) or [], fenced(answer)
    passed = 0
    for test in tests:
        if isinstance(test, str):
            outcome = sandbox.run_script(f"{source}\n{test}", seconds=reward.seconds)
            right = outcome.value is True
        else:
            given, expected = test
            outcome = sandbox.run_script(source, stdin=given, seconds=reward.seconds)
            right = outcome.error is None and _lines(outcome.stdout) == _lines(expected)
        passed += right
        if reward.all and not right:
            return 0.0
    return passed / len(tests)


def _compared(reward: MathReward, answer: str, asked: AnsweredPrompt, sandbox: ProgramSandbox) -> float | AnswerFault:
    """Whether an answer is what is expected, which `refuse_unreadable` has seen."""
    found = extracted(reward.extract, answer)
    if found is None:
        return 0.0
    arguments = {"answer": found, "expected": _expected(reward, asked.columns), "alone": reward.extract is not None}
    outcome = sandbox.run_function(MATH, "verify", arguments, seconds=reward.seconds)
    return AnswerFault(outcome.error.splitlines()[0]) if outcome.error is not None else float(outcome.value)


def _verified(
    reward: TaskReward,
    answers: Sequence[str],
    asked: Sequence[AnsweredPrompt],
    sandbox: ProgramSandbox,
    between: Callable[[], None],
) -> list[Value]:
    """What the verifier of each problem says. Answers go to one program; one by one where that does not end."""
    between()
    texts = [extracted(reward.extract, answer) for answer in answers]
    given = [at for at, text in enumerate(texts) if text is not None and text.strip()]
    arguments = {
        "problems": [asked[at].columns[reward.column] for at in given],
        "answers": [str(texts[at]).strip() for at in given],
        "seconds": reward.seconds,
    }
    outcome = sandbox.run_function(TASKS, "score", arguments, seconds=TASK_SECONDS + reward.seconds)
    values: list[Value] = [0.0] * len(answers)
    if outcome.error is None:
        for at, value in zip(given, outcome.value, strict=True):
            values[at] = AnswerFault(value) if isinstance(value, str) else float(value)
    elif len(given) == 1:
        values[given[0]] = AnswerFault(outcome.error.splitlines()[0])
    else:
        for at in given:
            values[at] = _verified(reward, [answers[at]], [asked[at]], sandbox, between)[0]
    return values


def _expected(reward: MathReward, columns: Columns) -> str:
    return str(columns[reward.column])


def open_sandbox(
    rewards: Sequence[RewardArm], cache_dir: Path | None, environment: EnvironmentArm | None = None
) -> ProgramSandbox | None:
    """The sandbox for these rewards and this environment; None where none of them needs one. NoSandbox,
    ToolsMissing."""
    parts: list[ProgramLimits] = []
    if any(isinstance(reward, MathReward) for reward in rewards):
        parts.append(limits_of(MATH, _installed("math", "math-verify", cache_dir)))
    if any(isinstance(reward, TaskReward) for reward in rewards):
        parts.append(limits_of(TASKS, _installed("tasks", "reasoning-gym", cache_dir)))
    if isinstance(environment, GameEnvironment):
        parts.append(limits_of(GAMES, _installed("games", "textarena", cache_dir)))
    if parts:
        folders = tuple(folder for part in parts for folder in part.folders)
        return ProgramSandbox(ProgramLimits(folders=folders, prelude="\n".join(part.prelude for part in parts)))
    needed = environment is not None or any(isinstance(reward, ProgramReward) for reward in rewards)
    return ProgramSandbox() if needed else None


def _installed(tools: ToolSet, name: str, cache_dir: Path | None) -> Tools:
    found = find(tools, cache_dir)
    if found is None:
        raise ToolsMissing(
            f"{name} is not on this machine; a service installs it while it prepares the job's model. Submit the job "
            "again, or for a run by hand name the `cache_dir` of a data root that has it",
            field="stage",
        )
    return found


def refuse_unreadable(
    rewards: Sequence[RewardArm],
    rows: Sequence[tuple[int, Columns]],
    sandbox: ProgramSandbox | None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """DataError that names the rows (line, columns) whose expected answer the reward `math` cannot read in its time.
    `between` is called now and then."""
    for reward in rewards:
        if not isinstance(reward, MathReward) or sandbox is None:
            continue
        texts = sorted({_expected(reward, columns) for _, columns in rows})
        unreadable: set[str] = set()
        for first in range(0, len(texts), READ_AT_ONCE):
            between()
            unreadable |= _unreadable(texts[first : first + READ_AT_ONCE], reward.seconds, sandbox)
        odd = [line for line, columns in rows if _expected(reward, columns) in unreadable]
        if odd:
            shown = next(_expected(reward, columns) for line, columns in rows if line == odd[0])
            raise DataError(
                f"the reward `math` reads the column `{reward.column}`, which is not mathematics that can be read in "
                f"{name_rows(odd)} (there {shown[:100]!r}); write it as LaTeX, words as \\text{{…}}, or in a text "
                "as \\boxed{…}, or use the reward `exact`",
                field="stage.reward",
                code="no_reward_column",
            )


def _unreadable(texts: Sequence[str], seconds: float, sandbox: ProgramSandbox) -> set[str]:
    outcome = sandbox.run_function(MATH, "readable", {"expected": list(texts)}, seconds=seconds)
    if outcome.error is None:
        return {text for text, readable in zip(texts, outcome.value, strict=True) if not readable}
    if len(texts) == 1:
        return set(texts)
    half = len(texts) // 2  # the one that takes too long shows when it is read alone
    return _unreadable(texts[:half], seconds, sandbox) | _unreadable(texts[half:], seconds, sandbox)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
