"""The reward `math`: what counts as the same, what takes too long, and expected answers that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from core.errors import DataError
from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.reward import RewardArm
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_FAILED
from core.train.recipe import run
from core.train.rollout.sandboxed.programs import (
    AnsweredPrompt,
    AnswerFault,
    open_sandbox,
    refuse_unreadable,
    values_of,
)
from core.train.tools.install import ToolsMissing
from tests.support.tools import CACHE, math_tools
from tests.support.trainer import events, write_rows, write_run
from worker.orders import tools_of


def math(**fields: Any) -> Any:
    return TypeAdapter(RewardArm).validate_python({"type": "math"} | fields)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    math_tools()
    opened = open_sandbox([math()], CACHE)
    assert opened is not None
    with opened:
        yield opened


def judge(sandbox: ProgramSandbox, expected: str, answer: str, **fields: Any) -> Any:
    return values_of(math(**fields), [answer], [AnsweredPrompt(3, "", {"reference": expected})], sandbox)[0]


@pytest.mark.parametrize(
    ("expected", "answer", "value"),
    [
        ("1/2", r"So it is $\frac{1}{2}$.", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        ("72", "First 70, then 2: the answer is 72.", 1),
        ("72", "The answer is 73.", 0),
        ("1,234", "1234", 1),
        ("1e5", "100000", 1),
        ("12 cm", "It is 12.", 1),
        ("x^2-1", "$(x-1)(x+1)$", 1),
        (r"\{1, 2\}", r"$\{2, 1\}$", 1),
        ("(1, 2]", "$[1, 2]$", 0),
        (r"\text{even}", r"\boxed{\text{even}}", 1),
        (r"Half of it, so $\boxed{\sqrt{2}}$", r"$2/\sqrt{2}$", 1),
        ("7", "", 0),
        ("7", "I do not know", 0),
    ],
)
def test_answers_are_compared_as_mathematics(sandbox: ProgramSandbox, expected: str, answer: str, value: float) -> None:
    assert judge(sandbox, expected, answer) == value


def test_what_is_extracted_is_the_answer_alone(sandbox: ProgramSandbox) -> None:
    tagged = {"extract": "<answer>(.*?)</answer>"}
    assert judge(sandbox, "x^2+1", "so <answer>1+x^2</answer>", **tagged) == 1
    assert judge(sandbox, "x^2+1", "so 1+x^2", **tagged) == 0


def test_an_answer_that_never_ends_gets_0_with_the_reason_and_the_next_is_judged(sandbox: ProgramSandbox) -> None:
    starts, asked = sandbox.starts, [AnsweredPrompt(line, "", {"reference": "7"}) for line in (3, 4)]
    endless, right = values_of(math(seconds=0.5), ["$9^{9^{9^{9}}}$", "$7$"], asked, sandbox)
    assert isinstance(endless, AnswerFault) and "0.5 s" in endless.why
    assert right == 1 and sandbox.starts == starts


def test_expected_answers_that_cannot_be_read_are_refused_with_their_rows(sandbox: ProgramSandbox) -> None:
    fine = [(line, {"reference": text}) for line, text in enumerate(("1/2", "$x$", "5 miles", r"\text{Monday}"), 1)]
    refuse_unreadable([math()], fine, sandbox)
    for text in ("", "$$", r"\frac{1}{", "???", "five apples", "Monday", "pi"):
        with pytest.raises(DataError, match=r"not mathematics that can be read in row 9 .*\\text"):
            refuse_unreadable([math()], [*fine, (9, {"reference": text})], sandbox)
    slow = [(line, {"reference": text}) for line, text in enumerate(("1", "$9^{9^{9^{9}}} + x$", "2"), 1)]
    seen: list[None] = []
    refuse_unreadable([math()], slow, sandbox, lambda: seen.append(None))
    assert seen


def test_a_job_with_such_a_row_is_refused_before_it_trains(tiny_dir: Path, tmp_path: Path) -> None:
    math_tools()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tools").symlink_to(CACHE / "tools")
    found = [{"prompt": f"say {n}", "reference": "1/2" if n < 3 else "five apples"} for n in range(5)]
    rows = write_rows(tmp_path / "rows.jsonl", found)
    stage = {"type": "grpo", "num_generations": 2, "max_completion_length": 4, "reward": ["math"]}
    run_dir = write_run(
        tmp_path / "run", tiny_dir, rows, cache_dir=tmp_path / "cache", stage=stage, training={"max_length": 64}
    )
    assert run(run_dir) == EXIT_FAILED
    told = events(run_dir)[-1]
    assert told["code"] == "no_reward_column" and "rows 4, 5 (there 'five apples')" in told["message"]


def test_the_library_is_asked_for_while_the_job_is_prepared() -> None:
    job = {"model": "a/b", "data": "rows.jsonl", "tracking": ["tensorboard"]}
    stage = {"type": "grpo", "reward": ["math", "number"]}
    assert tools_of(resolve(parse_job(job | {"stage": stage}))) == ["math", "tensorboard"]
    assert tools_of(resolve(parse_job(job))) == ["tensorboard"]


def test_a_machine_without_the_library_says_so() -> None:
    with pytest.raises(ToolsMissing, match="math-verify is not on this machine"):
        open_sandbox([math()], None)
