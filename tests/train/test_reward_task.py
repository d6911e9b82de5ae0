"""Tasks of reasoning-gym: the table, the problems that a job gets, the verifiers, and a job that trains on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from core.data.rows import PromptOnly
from core.errors import DataError, SpecError
from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.data import TaskRows
from core.spec.axes.rollout.environment import TaskEnvironment
from core.spec.axes.rollout.reward import RewardArm
from core.spec.axes.rollout.tasks import TABLE
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_FAILED, EXIT_OK
from core.spec.run.folder import ROLLOUTS, rollout_file
from core.train.generation.sampling import Completion
from core.train.hub.model_cache import ModelCache
from core.train.recipe import run
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.rollout.sandboxed.programs import AnsweredPrompt, AnswerFault, answered, open_sandbox, values_of
from core.train.rollout.sandboxed.tasks import prepare_problems
from core.train.rollout.turns.episodes import Player
from core.train.rollout.turns.replies import Replies
from tests.support.tasks import described
from tests.support.tools import CACHE, task_tools
from tests.support.trainer import events, write_rows, write_run
from worker.orders import tools_of

REWARD: Any = TypeAdapter(RewardArm).validate_python({"type": "task", "extract": "<answer>(.*?)</answer>"})


SUMS: dict[str, Any] = {"name": "chain_sum", "size": 12, "level": 0}
"""Problems of several tests: each set that is new to the cache starts a program that imports the library."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    task_tools()
    opened = open_sandbox([REWARD], CACHE)
    assert opened is not None
    with opened:
        yield opened


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ModelCache:
    task_tools()
    return ModelCache(tmp_path_factory.mktemp("models"))


def path_of(cache: ModelCache, **fields: Any) -> Path:
    told: list[tuple[str, int, int | None]] = []

    def tell(phase: str, done: int, total: int | None) -> None:
        told.append((phase, done, total))

    (path,), origin = prepare_problems(TaskRows(**fields), "data.train", cache, CACHE, offline=True, told=tell)
    assert origin["name"] == fields["name"]
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(line: int, row: dict[str, Any]) -> AnsweredPrompt:
    extra = {"task": row["task"]}
    return answered(line, row["prompt"], PromptOnly(row["prompt"], row.get("reference"), extra))


def test_the_table_is_what_the_library_has(sandbox: ProgramSandbox) -> None:
    assert described(sandbox) == json.loads(TABLE.read_text(encoding="utf-8"))


def test_a_verifier_replies_until_an_answer_is_right(
    sandbox: ProgramSandbox, cache: ModelCache, tiny_dir: Path
) -> None:
    row = rows_of(path_of(cache, **SUMS))[0]
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    said = [["<answer>no</answer>", "no"], [f"<answer>{row['reference']}</answer>", "no"]]

    def complete(prompts: Any, keys: Any, most: Any) -> list[Completion]:
        texts, answers = said.pop(0), len(prompts)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts][:answers]
        return [Completion(one, [-1.0] * len(one), True) for one in ids]

    told: list[str] = []
    player = Player(
        TaskEnvironment(max_turns=2, feedback="Wrong."), REWARD, sandbox,
        Replies(Renderer(tokenizer, RenderOptions(row_format="prompt")), "user"), 400,
        text=tokenizer.decode, notice=lambda code, words: told.append(code), between=lambda: None,
    )  # fmt: skip
    one = asked(1, row)
    right, wrong = player.play([[5], [6]], [[(0, 0)], [(0, 1)]], [one, one], complete)
    assert [text for _, text in right.turns] == [
        "<answer>no</answer>",
        "Wrong.",
        f"<answer>{row['reference']}</answer>",
    ]
    assert right.finished and not wrong.finished and not told
    assert [who for who, _ in wrong.turns] == ["assistant", "environment", "assistant"]
    assert "Wrong." in tokenizer.decode([t for t, mine in zip(right.tokens, right.learned, strict=True) if not mine])
    assert {p for p, mine in zip(right.logprobs, right.learned, strict=True) if not mine} == {0.0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "chain_sums"}, "no task `chain_sums`; did you mean `chain_sum`"),
        ({"name": "codeio"}, "docs/tasks.md lists them all"),
        ({"name": "chain_sum", "level": 11}, "levels 0 to 10"),
        ({"name": "acre", "level": 0}, "no levels"),
        ({"name": "chain_sum", "options": {"max_term": 3}}, "no option `max_term`; did you mean `max_terms`"),
        ({"name": "chain_sum", "options": {"max_terms": "3"}}, "is a number, as in its default 6"),
        ({"name": "rush_hour", "format": "prompt_completion"}, "no answer of their own"),
        ({"name": "chain_sum", "seed": 4096}, "4096"),
    ],
)
def test_what_a_task_cannot_do_is_told_at_submit(data: dict[str, Any], words: str) -> None:
    job = {"model": "a/b", "data": {"train": {"type": "task"} | data}, "stage": {"type": "grpo", "reward": ["task"]}}
    with pytest.raises(SpecError) as refused:
        resolve(parse_job(job))
    assert words in " ".join(fault.message for fault in refused.value.faults)


def test_a_job_needs_no_file_and_asks_for_the_library() -> None:
    train = {"type": "task", "name": "chain_sum"}
    job = {"model": "a/b", "data": {"train": train}, "stage": {"type": "grpo", "reward": ["task"]}}
    spec = resolve(parse_job(job))
    assert spec.data.train == TaskRows(name="chain_sum") and tools_of(spec) == ["tasks"]


def test_problems_are_a_function_of_their_fields_and_seeds_share_none(cache: ModelCache, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"name": "word_sequence_reversal", "size": 40, "instruction": "Answer in tags."}
    path = path_of(cache, **fields)
    assert path_of(cache, **fields) == path
    again = path_of(ModelCache(tmp_path), **fields)
    assert again != path and again.read_bytes() == path.read_bytes()
    here, there = rows_of(path), rows_of(path_of(cache, **fields | {"seed": 1}))
    assert len({row["prompt"] for row in here + there}) == 80
    assert all(row["prompt"].endswith("\n\nAnswer in tags.") for row in here)


def test_level_and_options_make_problems_harder_and_a_task_may_refuse_them(cache: ModelCache) -> None:
    def terms(**fields: Any) -> set[int]:
        found = rows_of(path_of(cache, **SUMS | fields))
        return {len(row["prompt"].split("=")[0].split()) for row in found}

    easy, hard = terms(), terms(level=None, options={"min_terms": 9, "max_terms": 9})
    assert max(easy) < min(hard) and len(hard) == 1
    assert terms(options={"min_terms": 9, "max_terms": 9}) == hard
    with pytest.raises(DataError, match=r"makes no problems with this level and these options: .*max_terms") as refused:
        path_of(cache, name="chain_sum", options={"min_terms": 9})
    assert refused.value.code == "task_refused" and refused.value.field == "data.train.options"


@pytest.mark.parametrize("name", ["chain_sum", "arc_1d", "countdown", "tower_of_hanoi", "prime_factorization", "maze"])
def test_a_right_answer_gets_1_and_others_less(sandbox: ProgramSandbox, cache: ModelCache, name: str) -> None:
    rows = rows_of(path_of(cache, **SUMS if name == SUMS["name"] else {"name": name, "size": 2}))[:2]
    prompts = [asked(line, row) for line, row in enumerate(rows, 1)]
    right = [f"So it is <answer> {row['reference']}\n</answer>" for row in rows]
    assert values_of(REWARD, right, prompts, sandbox) == [1.0, 1.0]
    wrong = values_of(REWARD, ["<answer>who knows</answer>", right[1].replace("<answer>", "")], prompts, sandbox)
    assert isinstance(wrong[0], AnswerFault) or wrong[0] < 0.5
    assert wrong[1] == 0.0


def test_an_answer_that_is_never_verified_gets_0_with_the_reason(sandbox: ProgramSandbox, cache: ModelCache) -> None:
    row = rows_of(path_of(cache, name="countdown", size=2))[0]
    reward = REWARD.model_copy(update={"seconds": 0.5})
    answers = [f"<answer>{text}</answer>" for text in ("9**9**9**9", row["reference"], "")]
    endless, right, empty = values_of(reward, answers, [asked(1, row)] * 3, sandbox)
    assert isinstance(endless, AnswerFault) and "0.5 s" in endless.why
    assert right == 1.0 and empty == 0.0


def linked(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tools").symlink_to(CACHE / "tools")
    return folder


STAGE = {"type": "grpo", "num_generations": 4, "max_completion_length": 6, "temperature": 1.5, "reward": [
    "task", {"type": "regex", "pattern": "[a-m]"}
]}  # fmt: skip


def test_a_job_trains_on_a_task_and_is_evaluated_on_other_problems(
    tiny_dir: Path, tmp_path: Path, cache: ModelCache
) -> None:
    run_dir = write_run(
        tmp_path / "run",
        tiny_dir,
        path_of(cache, **SUMS),
        held_out=path_of(cache, **SUMS | {"seed": 1, "size": 2}),
        cache_dir=linked(tmp_path / "cache"),
        stage=STAGE,
        training={"max_steps": 2, "per_device_train_batch_size": 4, "max_length": 128},
    )
    assert run(run_dir) == EXIT_OK, events(run_dir)[-1]
    lines = rows_of(run_dir / ROLLOUTS / rollout_file(0))
    assert all(set(line["rewards"]) == {"task", "regex"} for line in lines)
    told = events(run_dir, "evaluation")
    assert len(told) == 2 and all("eval_rewards/task/mean" in json.dumps(event) for event in told)


def test_rows_that_are_no_problems_are_refused_with_their_lines(tiny_dir: Path, tmp_path: Path) -> None:
    task_tools()
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"say {n}", "task": {"name": "none"}} for n in range(3)])
    cache_dir = linked(tmp_path / "cache")
    run_dir = write_run(tmp_path / "run", tiny_dir, rows, cache_dir=cache_dir, stage=STAGE, training={"max_length": 64})
    assert run(run_dir) == EXIT_FAILED
    told = events(run_dir)[-1]
    assert told["code"] == "no_reward_column" and "no problem of a task" in told["message"]
