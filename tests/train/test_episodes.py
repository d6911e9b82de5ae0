"""Episodes of several turns: who writes what, what is learned of it, where they end, and what goes wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from core.data.rows import Message, PromptOnly
from core.errors import SpecError
from core.spec.axes.rendering import ModelTemplate
from core.spec.axes.rollout.stages import PPOStage
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED
from core.train.base.stop import Stop
from core.train.engine import Engine
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.rollout.buffer import Rollout
from core.train.rollout.estimation import estimate, explained_variance
from core.train.rollout.turns.replies import Replies
from tests.support.rollouts import figures, finished, rollout_run
from tests.support.trainer import events, notices, run, weights, write_rows

# The reply says which answer it is to and how long that was, so that it depends on what the model said.
COUNTS = """
calls = []
def respond(prompt, answers, limit):
    calls.append(prompt)
    assert len(calls) == 1, "each call finds a module of its own"
    said = len(answers[-1])
    if len(answers) == limit:
        return {"reply": None, "reward": said / 10}
    return {"reply": f"{len(answers)}: {said} letters. ", "reward": 0.01}
"""
STAGE: dict[str, Any] = {
    "type": "grpo", "num_generations": 4, "max_completion_length": 110, "slots": 5, "temperature": 1.5,
    "reward": ["environment", {"type": "regex", "pattern": "[a-f]", "name": "early", "weight": 0.1}],
    "environment": {"type": "python", "source": COUNTS, "max_turns": 3, "max_turn_length": 6},
}  # fmt: skip
ROOM = {"max_length": 200}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = [{"prompt": [{"role": "user", "content": f"say a letter, {n}"}], "limit": 1 + n % 4} for n in range(9)]
    return write_rows(tmp_path_factory.mktemp("rows") / "prompts.jsonl", asked)


def order(folder: Path, tiny_dir: Path, rows: Path, **axes: Any) -> Path:
    stage = STAGE | axes.pop("stage", {})
    stage["environment"] = STAGE["environment"] | axes.pop("environment", {})
    return rollout_run(folder, tiny_dir, rows, stage=stage, training=ROOM | axes.pop("training", {}), **axes)


def go(*args: Any, **axes: Any) -> Path:
    return finished(order(*args, **axes))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "artifacts" / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def calm(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("calm") / "run", tiny_dir, rows)


def test_the_model_and_its_environment_take_turns(calm: Path, rows: Path) -> None:
    limits = [json.loads(line)["limit"] for line in rows.read_text().splitlines()]
    told = lines(calm)
    assert len(told) == 36 and {len(one["turns"]) for one in told} == {1, 3, 5}
    for one in told:
        answers = [turn["content"] for turn in one["turns"] if turn["role"] == "assistant"]
        replies = [turn["content"] for turn in one["turns"] if turn["role"] == "environment"]
        limit = limits[one["line"] - 1]
        assert len(answers) == min(limit, 3) and len(replies) == len(answers) - 1
        for number, (answer, reply) in enumerate(zip(answers, replies, strict=False), 1):
            assert reply == f"{number}: {len(answer)} letters. "
        assert one["finished"] == (limit <= 3), "an episode that its environment has not ended is cut off"
        worth = len(answers[-1]) / 10 if limit <= 3 else 0.01
        assert one["rewards"] == {
            "environment": pytest.approx(worth), "early": any(letter in "abcdef" for letter in answers[-1])
        }  # fmt: skip
        assert one["tokens"] <= 6 * len(answers)
    for values in figures(calm).values():
        assert 1 <= values["turns/mean"] <= values["turns/max"] <= 3
        assert values["sampler_mismatch_kl"] < 1e-6, "both see the replies at the same places"
        assert values["completions/mean_length"] <= 18
    assert max(values["turns/max"] for values in figures(calm).values()) == 3
    assert any(values["grad_norm"] > 0 for values in figures(calm).values())


def test_only_tokens_of_the_model_are_learned() -> None:
    masks = [[1, 1, 0, 0, 1], [1, 0]]
    answers = [[11, 12, 13, 14, 15], [21, 22]]
    sampler = np.asarray([-1, -2, 0, 0, -3, -4, 0], dtype=np.float32)
    made = Rollout(
        0, [[1, 2]], [0], answers, [True, True], {"r": [1.0, 0.0]}, [1.0, 0.0], [0.5, -0.5], {"sampler": sampler},
        learned=masks, turns=[[("assistant", "x")], []],
    )  # fmt: skip
    again = Rollout.of(json.loads(json.dumps(made.state_dict())))
    assert again.learned == masks and again.lengths() == [3, 1]
    batch = again.dataset().collate([0, 1], 0)
    assert batch.labels.tolist() == [[-100, -100, 11, 12, -100, -100, 15], [-100, -100, 21, -100, -100, -100, -100]]
    assert batch.token_values["sampler"].tolist() == [-1, -2, -3, -4]
    assert made.figures(5)["turns/max"] == 2 and made.figures(5)["completions/max_length"] == 3


def test_a_reply_is_rendered_as_the_chat_template_writes_it(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    chat, plain = PromptOnly((Message("user", "x"),)), PromptOnly("x")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for role in ("user", "tool"):
        replies = Replies(Renderer(tokenizer, RenderOptions(row_format="prompt")), role)
        replies.refuse_unrendered([chat, plain])
        expected = ids(f"<|im_end|>\n<|im_start|>{role}\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert replies.between(chat, "hi", last=ids("a")[0]) == expected
        assert replies.between(chat, "hi", last=tokenizer.eos_token_id) == expected[1:], "the model has written it"
    said = replies.between(chat, "<|im_end|>", last=tokenizer.eos_token_id)
    assert said.count(tokenizer.eos_token_id) == 1, "control tokens in a reply are plain text"
    joined = Replies(
        Renderer(tokenizer, RenderOptions(rendering=ModelTemplate(pairs="joined"), row_format="prompt")), "user"
    )
    assert joined.between(plain, " hi", last=ids("a")[0]) == ids(" hi")
    assert joined.cut("word word", 4) == "word" and joined.cut("word", 4) is None


def test_a_template_without_a_place_for_replies_is_refused(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    replies = Replies(Renderer(tokenizer, RenderOptions(row_format="prompt")), "user")
    with pytest.raises(SpecError, match="no place for a reply") as refused:
        replies.refuse_unrendered([PromptOnly((Message("user", "x"),))])
    assert refused.value.code == "environment_not_rendered"


@pytest.mark.parametrize(("name", "call"), [("complete", 2), ("complete", 3), ("backward", 6)])
def test_a_run_that_was_stopped_in_an_episode_goes_on_with_the_same_bits(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    stop, calls, before = Stop(), [0], getattr(Engine, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            stop.requested = True
        return before(*args, **options)

    first = order(tmp_path / "first", tiny_dir, rows)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, name, counted)
        assert run(first, stop) == EXIT_CHECKPOINTED, events(first)[-1]
    second = go(tmp_path / "second", tiny_dir, rows, resume_from=[first])
    assert weights(second) == weights(calm) and figures(first, second) == figures(calm)
    assert lines(second) == lines(calm)


def test_ppo_values_the_tokens_of_the_model_across_replies_and_resumes_in_an_episode(
    tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes: dict[str, Any] = {
        "stage": {"type": "ppo", "num_generations": 1, "num_iterations": 2, "beta": 0.05},
        "training": {"max_steps": 4},
    }
    calm = go(tmp_path / "calm", tiny_dir, rows, **axes)
    assert {len(one["turns"]) for one in lines(calm)} > {1, 3}
    told = figures(calm)
    assert all(values["grad_norm"] > 0 and values["turns/max"] > 1 for values in told.values())
    assert all(values["approx_kl"] == 0 for step, values in told.items() if step in (1, 3)), "the first of two steps"
    stop, calls, before = Stop(), [0], Engine.complete

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        stop.requested = calls[0] == 5
        return before(*args, **options)

    first = order(tmp_path / "first", tiny_dir, rows, **axes)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "complete", counted)
        assert run(first, stop) == EXIT_CHECKPOINTED, events(first)[-1]
    second = go(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert weights(second) == weights(calm) and figures(first, second) == told
    assert lines(second) == lines(calm)


def test_advantages_go_from_each_token_of_the_model_to_its_next_one() -> None:
    stage = PPOStage.model_validate({"reward": ["environment"], "beta": 0.1, "gamma": 0.9, "lam": 0.8})
    masks = [[1, 1, 0, 0, 1], [1, 0]]
    learned = np.asarray([one for mask in masks for one in mask], dtype=bool)
    numbers = np.random.default_rng(2).normal(size=(4, len(learned))).astype(np.float32) * learned
    names = ("sampler", "old", "reference", "value")

    def made(answers: list[list[int]], values: Any, **more: Any) -> Rollout:
        of_tokens, rewards = dict(zip(names, values, strict=True)), [1.0, 0.0]
        rollout = Rollout(0, [[1, 2]], [0], answers, [True, True], {"r": rewards}, rewards, [], of_tokens, **more)
        rollout.advantages = estimate(rollout, stage)
        return rollout

    episodes = made([[11, 12, 13, 14, 15], [21, 22]], numbers, learned=masks, turns=[[("assistant", "x")], []])
    single = made([[11, 12, 15], [21]], numbers[:, learned])
    for name in ("return", "advantage"):
        found = episodes.token_values[name]
        assert found[learned].tolist() == single.token_values[name].tolist() and not found[~learned].any()
    assert episodes.advantages == pytest.approx(single.advantages)
    assert explained_variance(episodes) == explained_variance(single)


def test_how_a_step_is_cut_and_where_prompts_are_computed_changes_nothing(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.train.recipe.share_prompts", lambda *_: "this test")
    whole = go(
        tmp_path / "run", tiny_dir, rows,
        training={"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    )  # fmt: skip
    for step, values in figures(whole).items():
        for name in ("loss", "grad_norm", "reward"):
            assert values[name] == pytest.approx(figures(calm)[step][name], rel=1e-4, abs=1e-6), (step, name)


def test_an_exact_sampler_has_the_bits_of_training_in_later_turns_too(
    tiny_dir: Path, rows: Path, tmp_path: Path
) -> None:
    stage = {"type": "rloo", "sampler": "exact", "beta": 0.05}
    run_dir = go(tmp_path / "run", tiny_dir, rows, stage=stage, training={"max_steps": 2})
    assert [values["sampler_mismatch_kl"] for values in figures(run_dir).values()] == [0.0] * 2


def test_prompts_of_plain_text_are_continued_by_the_reply(tiny_dir: Path, tmp_path: Path) -> None:
    some = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"say {n}:", "limit": 2} for n in range(3)])
    run_dir = go(tmp_path / "run", tiny_dir, some, data={"rendering": {"type": "model", "pairs": "joined"}})
    for one in lines(run_dir):
        first, reply, last = (turn["content"] for turn in one["turns"])
        assert one["completion"].replace("\ufffd", "") == (first + reply + last).replace("\ufffd", "")


# --- what goes wrong -------------------------------------------------------------------------------------

RAISES = """
def respond(answers, limit):
    if len(answers) == 2 and limit == 3:
        raise KeyError('a move')
    return 'on'
"""
# Asleep: a program that keeps a processor busy is one of tests/train/test_reward_programs.py.
HANGS = """
import time
def respond(answers, limit):
    while len(answers) == 2 and limit == 3:
        time.sleep(1)
    return 'on'
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (RAISES, "KeyError: 'a move' (line 4 of the source)"),
        (HANGS, "not done after"),
        ("def respond():\n    return [1]", "return the text of a reply"),
        ("def respond():\n    return float('nan')", "return the text of a reply"),
        ("def answer():\n    return 1", "defines no function `respond`"),
    ],
    ids=["raises", "hangs", "list", "nan", "no function"],
)
def test_an_environment_that_fails_ends_the_job_with_the_row(
    tiny_dir: Path, rows: Path, tmp_path: Path, source: str, why: str
) -> None:
    failed = order(tmp_path / "run", tiny_dir, rows, environment={"source": source, "seconds": 1.0})
    assert run(failed) == EXIT_FAILED
    said = events(failed)[-1]
    assert said["code"] == "environment_failed" and why in said["message"] and "to row" in said["message"], said


def test_an_environment_that_fails_may_be_left_out(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    run_dir = go(tmp_path / "run", tiny_dir, rows, environment={"source": RAISES}, stage={"reward_error": "skip"})
    assert [one["code"] for one in notices(run_dir)].count("environment_failed") == 1
    hurt = [one for one in lines(run_dir) if "environment" in one["unscored"]]
    assert hurt and all(one["reward"] == 0 and one["advantage"] == 0 and not one["finished"] for one in hurt)
    assert {one["line"] % 4 for one in hurt} == {3} and len(hurt) < len(lines(run_dir))


def test_replies_beyond_their_room_are_cut_or_end_the_episode(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    talks = {"source": "def respond():\n    return 'word ' * 1000", "max_reply_length": 10}
    run_dir = go(tmp_path / "run", tiny_dir, rows, environment=talks, training={"max_steps": 1})
    assert [one["code"] for one in notices(run_dir)].count("replies_cut") == 1
    for one in lines(run_dir):
        assert not one["finished"] and {turn["content"] for turn in one["turns"][1::2]} == {"word word "}
    roomy = talks | {"max_reply_length": 500}
    ended = go(tmp_path / "ended", tiny_dir, rows, environment=roomy, training={"max_steps": 1})
    assert all(len(one["turns"]) == 1 and not one["finished"] for one in lines(ended))
